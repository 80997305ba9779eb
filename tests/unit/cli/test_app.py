"""Help everywhere; an error is one paragraph on stderr with status 2; a bug keeps its traceback."""

import pytest

from wholestep.cli import app, bench, demo, main
from wholestep.errors import RankMismatchError

COMMANDS = ["demo", "run", "explain", "bench", "calibrate"]


def leave(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(args)
    return int(left.value.code or 0)


@pytest.mark.parametrize("args", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_is_everywhere(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(*args, "--help") == 0
    shown = capsys.readouterr().out
    assert "Usage: wholestep" in shown
    assert all(name in shown for name in (args or COMMANDS))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_nproc_is_by_default(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    leave(name, "--help")
    assert "default: one" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("--version") == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["demo", "--steps", "1"], "at least 2"),
        (["bench", "--steps", "0"], "at least 2"),
        (["demo", "--nproc", "0"], "at least 1 process"),
        (["calibrate", "--nproc", "0"], "at least 1 process"),
        (["run", "nowhere.py"], "nowhere.py"),
        (["explain", "nowhere.py:make"], "nowhere.py"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_with_status_2(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(*args) == app.ERROR_STATUS == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("ConfigError: ")
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_an_error_from_the_ranks_is_shown_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "plans differ:\n-  all_reduce [bold](f32[3])[/bold]\n+  " + "x" * 300

    def fail(settings: object, *, nproc: int) -> None:
        raise RankMismatchError(message)

    monkeypatch.setattr(demo, "run_demo", fail)
    assert leave("demo") == 2
    assert capsys.readouterr().err == f"RankMismatchError: {message}\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(settings: object, *, nproc: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(bench, "run_bench", fail)
    with pytest.raises(ZeroDivisionError):
        main(["bench"])


def test_a_wrong_option_has_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("demo", "--stepz", "3") == 2
    assert "--stepz" in capsys.readouterr().err
