"""Fingerprints of saved steps: every difference is found, and named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wholestep.api.cache.artifact import file_name
from wholestep.api.cache.fingerprint import difference
from wholestep.api.cache.records import Fingerprint

TEXT = st.text(max_size=120)
LINES = st.lists(st.tuples(TEXT, TEXT), max_size=5).map(tuple)
FINGERPRINTS = st.dictionaries(TEXT, LINES, min_size=1, max_size=4)


@given(FINGERPRINTS)
def test_what_is_the_same_has_no_difference_and_one_key(fingerprint: Fingerprint) -> None:
    again = {name: tuple(lines) for name, lines in fingerprint.items()}
    assert difference(fingerprint, again) is None
    assert file_name("m:f", fingerprint, "plan") == file_name("m:f", again, "plan")


@given(FINGERPRINTS, st.data())
def test_every_change_of_a_line_is_found_and_named(fingerprint: Fingerprint, data: st.DataObject) -> None:
    places = [(subject, number) for subject, lines in fingerprint.items() for number in range(len(lines))]
    if not places:
        return
    subject, number = data.draw(st.sampled_from(places))
    name, was = fingerprint[subject][number]
    new = data.draw(TEXT.filter(lambda text: text != was))
    lines = list(fingerprint[subject])
    lines[number] = (name, new)
    changed = {**fingerprint, subject: tuple(lines)}
    assert (difference(fingerprint, changed) or "").startswith(f"{subject}: {name} was ")
    assert file_name("m:f", fingerprint, "plan") != file_name("m:f", changed, "plan")


@given(FINGERPRINTS, st.data())
def test_every_line_that_comes_or_goes_is_found(fingerprint: Fingerprint, data: st.DataObject) -> None:
    subject = data.draw(st.sampled_from(sorted(fingerprint)))
    longer = {**fingerprint, subject: (*fingerprint[subject], ("a new line", "it"))}
    assert difference(fingerprint, longer) == f"{subject}: a new line is new"
    assert difference(longer, fingerprint) == f"{subject}: a new line is gone"


def test_a_difference_inside_of_a_long_text_is_shown() -> None:
    told = difference({"a": (("b", "x" * 500 + "was"),)}, {"a": (("b", "x" * 500 + "now"),)})
    assert told is not None
    assert "was" in told
    assert "now" in told
    assert len(told) < 250
