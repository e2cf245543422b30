"""The draft that a setup asks for, opened as what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.engine.load.drafts.find import means_assistant, means_dflash, means_eagle, means_head
from toolkit.engine.load.setup import Setup
from toolkit.models.registry import from_files
from toolkit.runners.base import Runner

if TYPE_CHECKING:
    from toolkit.engine.load.drafts.head import OpenHead
    from toolkit.engine.load.drafts.layers import OpenLayers
    from toolkit.engine.load.drafts.model import OpenDraft

    OpenedDraft = OpenDraft | OpenHead | OpenLayers


def open_draft_of(setup: Setup, runner: Runner) -> OpenedDraft | None:
    """What drafts for the model of ``runner``, without weights; None where nothing does. Raises ToolkitError or
    UsageError where what was asked for is none for it."""
    files = setup.draft
    if files is None:
        from toolkit.engine.load.drafts.mtp import open_mtp_layer

        families = from_files(getattr(setup.config, "family_files", ()))
        return open_mtp_layer(setup.path, setup.config, runner, families, setup.source)
    if means_assistant(setup.config, files.path):
        from toolkit.engine.load.drafts.assistant import open_assistant_model

        return open_assistant_model(files.path, runner)
    if means_dflash(setup.config, files.path):
        from toolkit.engine.load.drafts.dflash import open_dflash_model

        return open_dflash_model(files.path, runner, setup.config.speculative_dflash_block_size)
    if means_eagle(setup.config, files.path):
        from toolkit.engine.load.drafts.eagle import open_eagle_layer

        return open_eagle_layer(files.path, runner)
    if means_head(setup.config, files.path):
        from toolkit.engine.load.drafts.head import open_head

        return open_head(files.path, runner)
    from toolkit.engine.load.drafts.model import open_draft

    return open_draft(files, runner, setup.tokenizer_dir, setup.config, setup.backend)
