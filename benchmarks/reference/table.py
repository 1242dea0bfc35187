"""docs/architectures.md, docs/reference.json and the list of equal rows: all rows' outcomes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from benchmarks.architectures import DOCUMENT, REPOSITORY
from benchmarks.reference.forms import FORMS
from benchmarks.reference.rows import BASE, Row

START: Final = "<!-- reference: written by `make reference` -->"
END: Final = "<!-- end of reference -->"
EQUAL: Final = REPOSITORY / "gateway" / "engine" / "models" / "equal_to_transformers.txt"
LIST: Final = REPOSITORY / "docs" / "reference.json"
TRIED: Final = ("equal", "WRONG", "throws", "refused", "limited")
Said = Mapping[str, Any]


def summary(items: Iterable[tuple[Row, Said]], uncovered: Mapping[str, Sequence[str]]) -> Any:
    """Return the outcomes of each architecture: by form, the base's, and keys by theirs.

    Wrong keys have their worst gap, limited ones the context; keys that are no rows are only
    counted.
    """
    found: dict[str, dict[str, Any]] = {}
    for row, said in sorted(items, key=lambda item: (item[0].architecture, item[0].form)):
        form = found.setdefault(row.architecture, {}).setdefault(row.form, {})
        outcome = said["outcome"]
        if row.key == BASE:
            form["base"] = outcome
            if outcome != "equal":
                form["reason"] = said.get("reason") or f"gap {_gap(said)}"
        elif outcome in ("unseen", "not made"):
            form[outcome] = form.get(outcome, 0) + 1
        elif outcome == "WRONG":
            form.setdefault(outcome, {})[row.key] = _gap(said)
        elif outcome == "limited":
            form.setdefault(outcome, {})[row.key] = said["context"]
        elif outcome == "throws":
            form.setdefault(outcome, {})[row.key] = said["reason"]
        else:
            form.setdefault(outcome, []).append(row.key)
    for name, own in found.items():
        own["uncovered"] = list(uncovered.get(name, ()))
    return found


def _gap(said: Said) -> float:
    return float(f"{max(said['gap'], said['decode']):.2g}")


def table(found: Mapping[str, Any]) -> str:
    """Write a summary as Markdown, a row for each architecture that transformers makes."""
    made = {
        name: own
        for name, own in found.items()
        if any(own.get(form, {}).get("base", "not made") != "not made" for form in FORMS)
    }
    equal = sum(
        not any(own.get(form, {}).get("WRONG") or _is_wrong(own, form) for form in FORMS)
        for own in made.values()
    )
    parts = [own.get(form, {}) for own in made.values() for form in FORMS]
    tried = sum(len(part.get(outcome, ())) for part in parts for outcome in TRIED)
    unseen = sum(part.get("unseen", 0) for part in parts)
    refused = sum(part.get("not made", 0) for part in parts)
    lines = [
        f"transformers {version('transformers')}, mlx-lm {version('mlx-lm')}, CPU, float32. "
        f"{len(made)} architectures, {equal} without a wrong row; {tried} rows change a key. "
        f"{unseen} more change no logits, and of {refused} transformers makes no model.",
        "",
        "| Architecture | As transformers 5 saves it | As originals are | Wrong | Refused "
        "| Limited | Not tried |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, own in made.items():
        cells = [_form(own.get(form, {})) for form in FORMS]
        cells += [
            _both(own, ("WRONG", "throws")),
            _both(own, ("refused",)),
            _both(own, ("limited",)),
            ", ".join(own.get("uncovered", ())),
        ]
        lines.append(f"| {name} | {' | '.join(each.replace('|', '/') for each in cells)} |")
    return "\n".join(lines)


def _keys(own: Said, form: str, *outcomes: str) -> list[str]:
    return [key for outcome in outcomes for key in own.get(form, {}).get(outcome, ())]


def _is_wrong(own: Said, form: str) -> bool:
    return own.get(form, {}).get("base") in ("WRONG", "throws")


def _form(form: Said) -> str:
    match form.get("base"):
        case None:
            return ""
        case "equal":
            return f"equal; keys: {len(form.get('equal', ()))}"
        case "refused":
            return "refused"
        case outcome:
            return f"{outcome}: {str(form.get('reason', ''))[:80]}"


def _both(own: Said, outcomes: Sequence[str]) -> str:
    """Return the keys of some outcomes, each with its form where the other's is another one."""
    by_form = {form: _keys(own, form, *outcomes) for form in FORMS}
    compared = sum(own.get(form, {}).get("base") == "equal" for form in FORMS)
    said: dict[str, list[str]] = {}  # kinds of rotation share their words
    for key in dict.fromkeys(key for keys in by_form.values() for key in keys):
        forms = [form for form in FORMS if key in by_form[form]]
        words = f"{key} ({forms[0]})" if len(forms) < compared else key
        head, rope, kind = words.partition("rope ")
        said.setdefault(head + rope, []).append(kind.replace(", ", " "))
    return "; ".join(
        f"{head}{', '.join(kinds)}" if len(kinds) < 2 else f"{head.strip()}: {', '.join(kinds)}"
        for head, kinds in said.items()
    )


def write(found: Mapping[str, Any]) -> None:
    """Put the table between its marks in the document, and the summary beside it."""
    document = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = document.partition(START)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{START}\n\n{table(found)}\n\n{END}{after}", encoding="utf-8")
    lines = [f"{json.dumps(name)}: {json.dumps(own)}" for name, own in found.items()]
    LIST.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    EQUAL.write_text("\n".join([*equal_families(found), ""]), encoding="utf-8")


def equal_families(found: Mapping[str, Said]) -> list[str]:
    """Return each `model_type` of which a form is equal and no row, of any task, is wrong."""
    told: dict[str, list[Said]] = {}
    for name, own in found.items():
        told.setdefault(name.partition(":")[0], []).append(own)
    return [kind for kind, each in told.items() if all(map(_is_equal, each))]


def _is_equal(own: Said) -> bool:
    forms = [own.get(form, {}) for form in FORMS]
    is_wrong = any(each.get("WRONG") or each.get("throws") for each in forms)
    bases = {each.get("base") for each in forms}
    return not is_wrong and not bases & {"WRONG", "throws"} and "equal" in bases
