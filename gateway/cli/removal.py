"""`mlx-gateway rm`: removes a model's files from the hub's cache, and nothing else."""

import os
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from gateway.app.named import load_served, name_nearest, parse_name
from gateway.cli import lazy
from gateway.cli.gateways import address, find_all, list_running
from gateway.cli.terminal import ModelName, ModelsFile, fail
from gateway.errors import ModelNotFound
from gateway.logs import human_bytes
from gateway.registry import (
    Catalog,
    HubSource,
    ModelSpec,
    read_short_names,
)
from gateway.settings import Settings, load_settings

if TYPE_CHECKING:
    from huggingface_hub import DeleteCacheStrategy

STORE = "blobs"  # the folder of the cache for files that repositories share


def rm(
    model: ModelName,
    is_sure: Annotated[bool, typer.Option("--yes", help="Ask nothing.")] = False,
    models: ModelsFile = None,
) -> None:
    """Remove a downloaded model from the hub's cache, after showing its files and asking."""
    settings = load_settings({"models": models})
    catalog, again = load_served(settings), f"mlx-gateway rm {shlex.quote(model)}"
    known = {name: str(entry["source"]) for name, entry in read_short_names().items()}
    source = _read_name(model, catalog, known)
    sharing = [spec.id for spec in catalog.specs if source.repo in _repositories(spec)]
    short = [name for name in known if f"hub:{source.repo}@" in f"{known[name]}@"]
    _require_unloaded(source, {*sharing, *short}, again, settings)
    blobs = lazy.hub.blobs_of(source, lazy.hub_of(settings, may_download=False))
    folder = blobs.parents[1].resolve() / blobs.parent.name
    with _unused(folder, again):
        plan = _plan(source, folder, model)
        paths = sorted((*plan.repos, *plan.snapshots))
        if sharing:
            print(f"Models of models.yaml with this repository: {', '.join(sharing)}")
        print(*paths, f"{human_bytes(plan.expected_freed_size)} in all", sep="\n")
        if not is_sure and not sys.stdin.isatty():
            fail(f"There is no terminal to ask on. Run:\n  {again} --yes", 2)
        if not is_sure:
            typer.confirm("Remove?", abort=True)
        with suppress(OSError):
            plan.execute()
    if left := [str(path) for path in paths if path.exists()]:
        fail(f"You may not remove all of {', '.join(left)}. Check who owns the files.")
    print(f"{model} is removed.")


def _read_name(model: str, catalog: Catalog, known: Mapping[str, str]) -> HubSource:
    """Return the repository of a model. End the command for an unknown name, path or package."""
    try:
        source = None if model in catalog.names() else parse_name(known.get(model, model))
        source = source or catalog.resolve(model).spec.source
    except ValueError as error:
        fail(error, 2)
    except ModelNotFound:
        names = [*catalog.names(), *known]
        fail(f"There is no model {model!r}. {name_nearest(model, names, 'rm', 'list')}")
    if isinstance(source, HubSource) and lazy.hub.is_installed(source):
        other = f"If the hub's copy is here too, run:\n  mlx-gateway rm hub:{source.repo}"
        fail(f"{model} comes as a package, so there is nothing to remove. {other}", 2)
    if not isinstance(source, HubSource) or source.file is not None:
        fail(f"{source} is no download of the hub (hub:org/name); rm takes only those, whole.", 2)
    return source


def _repositories(spec: ModelSpec) -> set[str]:
    parts = (spec, getattr(spec, "base_spec", None), getattr(spec, "draft_spec", None))
    return {getattr(part.source, "repo", "") for part in parts if part is not None}


def _require_unloaded(
    source: HubSource, ids: Collection[str], again: str, settings: Settings
) -> None:
    """End the command if a gateway of this user has loaded a model of a repository, by these ids or
    by the repository's name, or does not tell.
    """
    listed = [(url, model) for url in find_all(settings) for model in list_running(url, settings)]
    for url, model in listed:
        root, name = model["root"], shlex.quote(model["root"])
        stop = f"stop {name}" + f" --port {urlsplit(url).port}" * (url != address(settings))
        is_same = root in ids or f"{root}/".startswith(f"{source.repo}/")
        if is_same and model["state"] in ("loading", "loaded"):
            fail(f"{name} is {model['state']} at {url}. Run:\n  mlx-gateway {stop}\n  {again}")


@contextmanager
def _unused(folder: Path, again: str) -> Iterator[None]:
    """Hold the locks of a repository's files. End the command if a file is being downloaded."""
    with ExitStack() as stack:
        try:
            for lock in (folder.parent / ".locks" / folder.name).glob("*.lock"):
                stack.callback(os.close, lazy.prefix_files.lock(lock))
        except OSError:
            fail(f"{folder} is being downloaded. Once that has ended, run:\n  {again}")
        yield


def _plan(source: HubSource, folder: Path, model: str) -> "DeleteCacheStrategy":
    """Return huggingface_hub's plan to delete a source's revisions: all, unless it names one."""
    if not os.path.lexists(folder):
        fail(f"{source} is not on this disk.")
    if link := _find_link(folder):
        fail(f"{link} is a link out of the repository's folder: remove it yourself.")
    cache = lazy.scan_cache_dir(folder.parent)
    # Another repository may have the same commits, so the plan is made for this one alone.
    own = replace(cache, repos=frozenset(each for each in cache.repos if each.repo_path == folder))
    commits = [
        each.commit_hash
        for repo in own.repos
        for each in repo.revisions
        if source.revision in (None, each.commit_hash, *each.refs)
    ]
    if not commits:
        steps = "".join(f"\n  mlx-gateway {verb} {shlex.quote(model)}" for verb in ("pull", "rm"))
        fail(f"{folder} has no finished download of {source}. Finish it, then remove it:{steps}")
    return own.delete_revisions(*commits)


def _find_link(folder: Path) -> Path | None:
    """Return a link that leads out of a repository's folder, if there is one."""
    places = (folder, folder.parent / STORE)
    for path in (folder, *folder.rglob("*")):
        target = Path(os.path.realpath(path))
        is_inside = any(target.is_relative_to(place) for place in places)
        if path.is_symlink() and (path.is_dir() or not is_inside):
            return path
    return None
