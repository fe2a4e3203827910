"""Preemption notices: the clouds' ways of saying that a machine will be taken away, one small plug-in each."""

from penstock.instance.preemption.notice import MetadataError, Notice, NoticeSource
from penstock.instance.preemption.watch import CHOICES, Preemption, PreemptionConfig

__all__ = ["CHOICES", "MetadataError", "Notice", "NoticeSource", "Preemption", "PreemptionConfig"]
