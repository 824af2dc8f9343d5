"""Config: a user's DeepSpeed JSON as one frozen, typed object, or one error that names every problem."""

from naught.config.batch import Batch, derive_batch, refuse_accumulation
from naught.config.check import Note, Report, check, fill, load, refuse_auto, to_document
from naught.config.disk import disk_folder, disk_threads, named_folder
from naught.config.placing import place_by_stage, placement_of
from naught.config.read import Source
from naught.config.schema import Config
from naught.config.types import Effect

__all__ = [
    "Batch",
    "Config",
    "Effect",
    "Note",
    "Report",
    "Source",
    "check",
    "derive_batch",
    "disk_folder",
    "disk_threads",
    "fill",
    "load",
    "named_folder",
    "place_by_stage",
    "placement_of",
    "refuse_accumulation",
    "refuse_auto",
    "to_document",
]
