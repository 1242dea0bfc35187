"""How far a schema leads through its references, bounded before anything follows them.

Compilers follow `$ref` by native recursion, whose stack ends long before a schema's allowed bytes
do: llguidance 1.9.1 takes 3.4 to 4.7 kB of it for each subschema on the way (measured on x86-64),
and a stack that is too small kills the process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from gateway.engine.grammar.schemas import Node, Schema, children, refusal, resolve

MAX_PATH: Final = 400  # subschemas: under 2 MB of a stack that is 8 MB on Linux, 16 MB on macOS
_ANYWHERE: Final[Node] = {}  # stands for the whole document

Graph: TypeAlias = Mapping[int, "Target"]


@dataclass(slots=True)
class Target:
    """A subschema that references lead to, or the root.

    `deepest` counts the subschemas on the longest way down inside it; `refs` has, for each
    reference inside it, the subschemas down to it and where it leads.
    """

    deepest: int = 0
    refs: list[tuple[int, int]] = field(default_factory=list)


def check_path(root: Schema, most: int = MAX_PATH) -> None:
    """Raise BadRequest for a path through more than `most` subschemas, each entered once."""
    if isinstance(root, dict) and (found := longest_path(root)) > most:
        raise refusal(
            f"The JSON Schema leads through {found} subschemas, one inside the other or by `$ref`; "
            f"at most {most} are followed."
        )


def longest_path(root: Node) -> int:
    """Count the subschemas on the longest path down from the root, through references too.

    Exact unless references form a circle; those that do count as if each were on the path. A
    reference by anchor, or inside an inner `$id`, counts as leading through everything.
    """
    graph = _graph(root)
    rounds = _rounds(graph)
    round_of = {target: i for i, members in enumerate(rounds) for target in members}
    lengths: list[int] = []  # of the ways that begin in each round
    for i, members in enumerate(rounds):
        onward = [
            (down, lengths[round_of[to]])
            for target in members
            for down, to in graph[target].refs
            if round_of[to] != i
        ]
        comes_round = len(members) > 1 or any(to == members[0] for _, to in graph[members[0]].refs)
        own = sum(graph[target].deepest for target in members)
        if comes_round:
            lengths.append(own + max((length for _, length in onward), default=0))
        else:
            lengths.append(max([own, *(down + length for down, length in onward)]))
    return lengths[round_of[id(root)]]


def _graph(root: Node) -> Graph:
    """Survey the root and each subschema that a reference leads to, by identity.

    A target inside another counts as led to by it, so that each subschema is visited once.
    """
    total, has_ids = _counted(root)
    targets = {id(root): root}
    todo, seen = [root], {id(root)}
    while todo:
        node = todo.pop()
        led = _led_to(root, node, has_ids=has_ids)
        targets |= {id(each): each for each in led}
        for each in (*led, *children(node)):
            if id(each) not in seen:
                seen.add(id(each))
                todo.append(each)
    graph: dict[int, Target] = {}
    for key, start in targets.items():
        target = graph[key] = Target(total if start is _ANYWHERE else 0)
        inside = [(start, 1)]
        while inside:
            node, down = inside.pop()
            target.deepest = max(target.deepest, down)
            target.refs += [(down, id(to)) for to in _led_to(root, node, has_ids=has_ids)]
            for child in children(node):
                if id(child) in targets:
                    target.refs.append((down, id(child)))
                else:
                    inside.append((child, down + 1))
    return graph


def _led_to(root: Node, node: Node, *, has_ids: bool) -> tuple[Node, ...]:
    """Return the target of a subschema's own reference, if it has one."""
    if not isinstance(ref := node.get("$ref"), str):
        return ()
    _, _, fragment = ref.partition("#")
    if has_ids or (fragment and not fragment.startswith("/")):
        return (_ANYWHERE,)
    found = resolve(root, f"#{fragment}")
    return (found,) if isinstance(found, dict) else ()


def _counted(root: Node) -> tuple[int, bool]:
    """Return the number of objects in a document, and whether one inside it has an `$id`."""
    total, has_ids = 0, False
    todo: list[Any] = [root]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            total += 1
            has_ids = has_ids or (value is not root and isinstance(value.get("$id"), str))
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return total, has_ids


def _rounds(graph: Graph) -> list[list[int]]:
    """Group the targets that reach one another, each group after those it leads to.

    Kosaraju's two walks, without recursion of our own.
    """
    left: list[int] = []  # in the order in which a walk is done with them
    seen: set[int] = set()
    for start in graph:
        if start in seen:
            continue
        seen.add(start)
        walk = [(start, iter(graph[start].refs))]
        while walk:
            target, refs = walk[-1]
            for _, to in refs:
                if to not in seen:
                    seen.add(to)
                    walk.append((to, iter(graph[to].refs)))
                    break
            else:
                left.append(target)
                walk.pop()
    back: dict[int, list[int]] = {target: [] for target in graph}
    for target, each in graph.items():
        for _, to in each.refs:
            back[to].append(target)
    rounds: list[list[int]] = []
    grouped: set[int] = set()
    for start in reversed(left):
        if start in grouped:
            continue
        members, todo = [], [start]
        grouped.add(start)
        while todo:
            members.append(target := todo.pop())
            fresh = [to for to in back[target] if to not in grouped]
            grouped.update(fresh)
            todo += dict.fromkeys(fresh)
        rounds.append(members)
    rounds.reverse()
    return rounds
