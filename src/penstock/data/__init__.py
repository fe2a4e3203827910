"""Prompts in: sources of rows, chat templates, sets of prompts, and the order in which steps draw them."""

from penstock.data.order import PromptOrder
from penstock.data.prompts import DataOptions, PromptSet, load_prompts, load_train_and_eval
from penstock.data.sources import Message, Row, Source, read_source
from penstock.data.templates import PromptTemplate, Tokenizer, question_text

__all__ = [
    "DataOptions",
    "Message",
    "PromptOrder",
    "PromptSet",
    "PromptTemplate",
    "Row",
    "Source",
    "Tokenizer",
    "load_prompts",
    "load_train_and_eval",
    "question_text",
    "read_source",
]
