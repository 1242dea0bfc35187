"""Imports modules that need mlx or take long to import, each at its first use.

The modules are attributes, as in `lazy.hub.on_disk(...)`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import scan_cache_dir as scan_cache_dir
    from hypercorn.asyncio import serve as serve
    from hypercorn.utils import LifespanTimeoutError as LifespanTimeoutError
    from rich import progress as progress
    from rich.box import SIMPLE_HEAD as SIMPLE_HEAD
    from rich.console import Console as Console
    from rich.table import Column as Column
    from rich.table import Table as Table

    from gateway.app import engines as engines
    from gateway.app import gateway as gateway
    from gateway.app import limits as limits
    from gateway.app import prefix_files as prefix_files
    from gateway.app import ranks as ranks
    from gateway.app.chat_engines import count_kept as count_kept
    from gateway.app.named import hub_of as hub_of
    from gateway.bench import load as load
    from gateway.cli import screen as screen
    from gateway.doctor import trial as trial
    from gateway.engine import blas as blas
    from gateway.engine import device as device
    from gateway.engine import hub as hub
    from gateway.engine import inputs as inputs
    from gateway.engine.models import head_names as head_names
    from gateway.engine.models import sharding as sharding
    from gateway.engine.models.folder import Folder as Folder
    from gateway.engine.models.notes import verified_by as verified_by
    from gateway.engine.vision.families import FAMILIES as FAMILIES
    from gateway.jobs import Progress as Progress
    from gateway.jobs.steps import KvCost as KvCost
    from gateway.server import connections as connections
    from gateway.serving.generation import memory as memory
    from gateway.serving.ranks import links as links

# The names above by their modules, each imported at its first use.
_PLACES = {
    "huggingface_hub": ("scan_cache_dir",),
    "hypercorn.asyncio": ("serve",),
    "hypercorn.utils": ("LifespanTimeoutError",),
    "rich": ("progress",),
    "rich.box": ("SIMPLE_HEAD",),
    "rich.console": ("Console",),
    "rich.table": ("Column", "Table"),
    "gateway.app": ("engines", "gateway", "limits", "prefix_files", "ranks"),
    "gateway.app.chat_engines": ("count_kept",),
    "gateway.app.named": ("hub_of",),
    "gateway.bench": ("load",),
    "gateway.cli": ("screen",),
    "gateway.doctor": ("trial",),
    "gateway.engine": ("blas", "device", "hub", "inputs"),
    "gateway.engine.models": ("head_names", "sharding"),
    "gateway.engine.models.folder": ("Folder",),
    "gateway.engine.models.notes": ("verified_by",),
    "gateway.engine.vision.families": ("FAMILIES",),
    "gateway.jobs": ("Progress",),
    "gateway.jobs.steps": ("KvCost",),
    "gateway.server": ("connections",),
    "gateway.serving.generation": ("memory",),
    "gateway.serving.ranks": ("links",),
}


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            return getattr(__import__(place, fromlist=[name]), name)
    raise AttributeError(name)
