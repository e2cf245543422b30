"""The draft that a setup asks for, opened as what it is."""

from __future__ import annotations

from toolkit.engine.load.drafts.assistant import open_assistant_model
from toolkit.engine.load.drafts.dflash import open_dflash_model
from toolkit.engine.load.drafts.eagle import open_eagle_layer
from toolkit.engine.load.drafts.find import means_assistant, means_dflash, means_eagle, means_head
from toolkit.engine.load.drafts.head import OpenHead, open_head
from toolkit.engine.load.drafts.layers import OpenLayers
from toolkit.engine.load.drafts.model import OpenDraft, open_draft
from toolkit.engine.load.drafts.mtp import open_mtp_layer
from toolkit.engine.load.setup import Setup
from toolkit.models.registry import from_files
from toolkit.runners.base import Runner

OpenedDraft = OpenDraft | OpenHead | OpenLayers


def open_draft_of(setup: Setup, runner: Runner) -> OpenedDraft | None:
    """What drafts for the model of ``runner``, without weights; None where nothing does. Raises ToolkitError or
    UsageError where what was asked for is none for it."""
    files = setup.draft
    if files is None:
        families = from_files(getattr(setup.config, "family_files", ()))
        return open_mtp_layer(setup.path, setup.config, runner, families, setup.source)
    if means_assistant(setup.config, files.path):
        return open_assistant_model(files.path, runner)
    if means_dflash(setup.config, files.path):
        return open_dflash_model(files.path, runner, setup.config.speculative_dflash_block_size)
    if means_eagle(setup.config, files.path):
        return open_eagle_layer(files.path, runner)
    if means_head(setup.config, files.path):
        return open_head(files.path, runner)
    return open_draft(files, runner, setup.tokenizer_dir, setup.config, setup.backend)
