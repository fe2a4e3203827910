"""What a run is: strict models, the files and overrides that fill them, and the words that describe them."""

from penstock.config.describe import describe
from penstock.config.load import dump_toml, load_config, split_overrides
from penstock.config.run import RunConfig

__all__ = ["RunConfig", "describe", "dump_toml", "load_config", "split_overrides"]
