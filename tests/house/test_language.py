"""Language rules for code, pages and messages: unique class names, established terms, line length.

The rules are in CONTRIBUTING.md, the nouns in docs/GLOSSARY.md. The lists here contain phrases that were
reintroduced more than once.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.house.repository_files import (
    PACKAGE,
    ROOT,
    list_pages,
    native_files,
    parse_file,
    python_files,
    relative_path,
    text_files,
)

COLUMNS_MAX = 120
DECISION_SECTIONS = ["Context", "Decision", "Consequences", "Alternatives"]

# Pattern: what to write instead.
PHRASES = {
    r"\bso many\b": "'minimum/maximum number of ...'",
    r"\bso long\b(?! as)": "the duration: 'within timeout_s', 'for 30 s'",
    r"\bwithout a word\b": "'disconnected before ...', 'connection lost: ...'",
    r"\bto be had\b": "'available'",
    r"\bof use only\b": "'usable only ...'",
    r"\bsent away\b": "'preempted', 'rejected'",
    r"\bwho comes first\b": "'order', 'priority'",
    r"\bis at it\b": "'is running', 'is in progress'",
    r"\bgoes? on on\b": "'is still running on'",
    r"\b(?:is|are|was|be) taken in\b": "'joined', 'admitted', 'registered'",
    r"\bkeeper\b": "'supervisor'",
    r"\bhas not got the\b": "'could not be ...'",
    r"\b(?:is|are|was|were|been) (?:told|heard)\b": "'is notified', 'has received', 'responds'",
    r"\b(?:did not|does not|no) answer (?:within|in time)\b": "'did not respond within'",
    r"\bnobody (?:else )?(?:uses|needs|holds)\b": "the noun: 'no other tenant', 'no process'",
    r"\bout of use\b": "'disabled'",
    r"\bclos(?:es|ed?) the way\b": "'closes the tunnel'",
    r"\b(?-i:(?:node|job|run|token) id)\b": "'node ID', 'job ID', 'run ID', 'token ID'",
    r"\bnames with values\b": "'a mapping'",
}
IDENTIFIERS = {
    "told": "a verb that says what is returned, such as visible_job_fields",
    "_told": "a verb that says what is returned",
    "_came": "_arrivals",
    "Bell": "ChangeNotifier",
    "Wishes": "PlacementConstraints",
    "Convalescence": "RecoveryTracker",
    "kDoubt": "kSmoothing",
    "leave_unsaid": "discard_unwritable_stderr",
    "heard": "received",
    "said": "the noun: output, reason, message",
    "wishes": "constraints",
    "beside": "the relation: temporary, local_accelerator",
    "whose_turn": "wait_for_slot",
    "kTick": "a name with its unit, such as kClockTickNs",
}
_WORD = re.compile(r"\b(?:" + "|".join(map(re.escape, IDENTIFIERS)) + r")\b")


def find_class_names() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in python_files("genie"):
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(relative_path(path))
    return found


def test_no_two_classes_share_a_name() -> None:
    assert {name: places for name, places in find_class_names().items() if len(places) > 1} == {}


_NATIVE_TYPE = re.compile(
    r"^[ \t]*(?:template\s*<[^>]*>\s*)?"
    r"(?:(?:struct|class|enum(?:\s+class)?)\s+(?:alignas\(\w+\)\s+)?(?:\w+::)*([A-Z]\w*)\b(?!::|\s*;)"
    r"|using\s+([A-Z]\w*)\s*=\s*([^;]+);)",
    re.MULTILINE,
)


def find_native_type_names(texts: dict[str, str]) -> dict[str, list[str]]:
    """Definitions of C++ types by name, with their files; equal aliases count as one."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, text in texts.items():
        for match in _NATIVE_TYPE.finditer(text):
            defined = match[1] or match[2]
            found[defined].setdefault(match[3] or f"{name}:{match.start()}", name)
    return {name: list(places.values()) for name, places in found.items()}


def test_no_two_native_types_share_a_name() -> None:
    names = find_native_type_names({relative_path(path): path.read_text("utf-8") for path in native_files()})
    assert len(names) > 150
    assert {name: places for name, places in names.items() if len(places) > 1} == {}


def test_search_finds_native_types() -> None:
    texts = {
        "a.h": "struct SSL;\nclass Frame final : public Base {\n  enum class Kind : uint8_t { One };\n};\n",
        "b.h": "struct alignas(64) Frame {\n  struct Outer::Inner {};\n};\nusing Clock = steady_clock;\n",
        "c.cpp": "using Clock = steady_clock;\nusing Kind = int;\ntemplate <class T>\nclass Table {};\n",
    }
    assert find_native_type_names(texts) == {
        "Frame": ["a.h", "b.h"],
        "Kind": ["a.h", "c.cpp"],
        "Inner": ["b.h"],
        "Clock": ["b.h"],
        "Table": ["c.cpp"],
    }


@pytest.mark.parametrize("pattern", PHRASES)
def test_no_text_uses_a_banned_phrase(pattern: str) -> None:
    phrase = re.compile(pattern, re.IGNORECASE)
    hits = [
        f"{relative_path(path)}:{text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())}"
        for path in text_files()
        if path != Path(__file__)
        for text in [path.read_text("utf-8")]
        for match in phrase.finditer(text)
    ]
    assert hits == [], f"write {PHRASES[pattern]}"


def test_no_code_uses_a_banned_identifier() -> None:
    hits = [
        f"{relative_path(path)}: {name}: write {IDENTIFIERS[name]}"
        for path in [*python_files("genie"), *native_files()]
        for name in sorted(set(_WORD.findall(_read_identifiers(path))))
    ]
    assert hits == []


@pytest.mark.parametrize("page", list_pages(), ids=relative_path)
def test_lines_of_a_page_have_at_most_120_columns(page: Path) -> None:
    lines = enumerate(page.read_text("utf-8").splitlines(), start=1)
    assert [number for number, line in lines if len(line) > COLUMNS_MAX] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "decisions").glob("*.md")), ids=relative_path)
def test_decision_page_has_the_required_sections(page: Path) -> None:
    text = page.read_text("utf-8")
    assert re.match(rf"# {page.name[:4]}: \S", text)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == DECISION_SECTIONS


def test_glossary_defines_each_term_once() -> None:
    text = (ROOT / "docs" / "GLOSSARY.md").read_text("utf-8")
    terms = re.findall(r"^\| ([^|]+?) \| (?!meaning)[^|]+ \|$", text, re.MULTILINE)
    terms = [term for term in terms if not set(term) <= {"-"}]
    assert len(terms) > 50
    assert sorted(terms) == sorted(set(terms))


def _read_identifiers(path: Path) -> str:
    """Identifiers of a file, without strings and comments."""
    if path.suffix != ".py":
        return re.sub(r"//.*|\"(?:[^\"\\]|\\.)*\"", "", path.read_text("utf-8"))
    names = []
    for node in ast.walk(parse_file(path)):
        match node:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name))
            ):
                names.append(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
    return " ".join(names)


# --- tests of the rules -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Start with so many at least.",
        "left without a word",
        "the node is taken in",
        "a keeper of children",
        "the agent is told",
        "n1 did not answer within 5 s",
        "the node id n1",
    ],
)
def test_banned_phrase_is_detected(text: str) -> None:
    assert any(re.search(pattern, text, re.IGNORECASE) for pattern in PHRASES)


@pytest.mark.parametrize(
    "text", ["wait as long as it runs", "so long as the lease is valid", "the node ID n1"]
)
def test_phrase_similar_to_a_banned_one_is_allowed(text: str) -> None:
    assert not any(re.search(pattern, text, re.IGNORECASE) for pattern in PHRASES)


def test_banned_identifier_is_detected_outside_comments(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def told(x): return x.kDoubt  # Bell\n")
    (tmp_path / "b.cpp").write_text('const double kDoubt = 1; // Bell "Wishes"\n')
    assert set(_WORD.findall(_read_identifiers(tmp_path / "a.py"))) == {"told", "kDoubt"}
    assert set(_WORD.findall(_read_identifiers(tmp_path / "b.cpp"))) == {"kDoubt"}


def test_search_finds_the_classes_of_the_package() -> None:
    assert PACKAGE.is_dir()
    assert len(find_class_names()) > 300
