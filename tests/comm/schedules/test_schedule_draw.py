"""Text, pictures and the command."""

import sys
import xml.etree.ElementTree as ET

import pytest

from kos.comm.schedules import build, registry
from kos.comm.schedules.__main__ import main
from kos.comm.schedules.draw import draw, text
from kos.errors import InvalidArgument, install


def test_text():
    assert text(build("all_reduce", "ring", 3)).splitlines() == [
        "all_reduce/ring on 3 ranks, 3 chunks a unit",
        "round 0", "  0 -> 1  data[0] +   1 -> 2  data[1] +   2 -> 0  data[2] +",
        "round 1", "  0 -> 1  data[2] +   1 -> 2  data[0] +   2 -> 0  data[1] +",
        "round 2", "  0 -> 1  data[1]   1 -> 2  data[2]   2 -> 0  data[0]",
        "round 3", "  0 -> 1  data[0]   1 -> 2  data[1]   2 -> 0  data[2]"]
    gather = text(build("all_gather", "one_shot", 2))
    assert "  0 -> 1  input[0] as output[0]" in gather and "0: input[0] -> output[0]" in gather


def test_svg_has_an_arrow_for_each_message_and_a_line_for_each_rank(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    draw(build("all_reduce", "ring", 5), tmp_path / "ring.svg")
    root = ET.parse(tmp_path / "ring.svg").getroot()
    words = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(w.startswith("rank ") for w in words) == 5
    assert words.count("+0") == 4 and words.count("0") == 4 + 1  # chunk 0, and the number of round 0
    dashed = [p for p in root.iter("{http://www.w3.org/2000/svg}path") if "stroke-dasharray: 5,3" in p.get("style")]
    assert len(dashed) == 2 * 4 * 5, "shaft and head: the second half overwrites"


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="8064 messages, too many to draw"):
        draw(build("all_reduce", "ring", 64), tmp_path / "x.svg")


def test_the_command_draws_or_asks_first_whether_it_can(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    assert main(["two_shot", "--ranks", "3", "--draw", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    (tmp_path / "folder.png").mkdir()
    for file, problem in (("/nowhere/x.svg", "/nowhere/x.svg: expected a file to write, got no such folder"),
                          (str(tmp_path / "folder.png"), "got a folder"), ("x.pdf", "ends in .png or .svg"),
                          (str(tmp_path / "x.svg"), f"a picture needs matplotlib: {install('plot')}\n")):
        if file.endswith("x.svg"):
            monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert main(["ring", "--draw", file]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("kos: error: ") and problem in said.err
    for others in ([], ["ring", "--predict"]):
        with pytest.raises(SystemExit, match="2"):
            main([*others, "--draw", "x.svg"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "  halving_doubling  Recursive halving, then recursive doubling"),
        ("--collective scatter", "scatter\n  direct            The root sends every rank its block.\n"),
        ("tree --collective broadcast --ranks 4 --root 2", "2 -> 3  data[0]"),
        ("tree --collective broadcast --ranks 4", "proved right: 2 rounds, 2 with messages; a rank sends at most 2.00"),
        ("ring --ranks 1", "all_reduce/ring on 1 rank, 1 chunk a unit"),
        ("halving_doubling --ranks 4", "6 rounds, 4 with messages; a rank sends at most 1.50 S"),
        ("halving_doubling --ranks 13", "8 rounds, 8 with messages; a rank sends at most 2.75 S"),
        ("double_tree --ranks 13 --chunks 8", "15 rounds, 15 with messages; a rank sends at most 2.00 S"),
        ("hierarchical --ranks 4", "all ranks are in one node: --ranks-per-node makes several"),
        ("one_shot --collective all_gather --ranks 4", "a rank sends at most 0.75 S"),
    ],
)
def test_what_the_command_prints(arguments, said, capsys):
    assert main(arguments.split()) == 0
    assert said in capsys.readouterr().out


def test_the_command_predicts(capsys):
    assert main(["--predict", "--scales", "8,16", "--sizes", "1K,1M"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [x for x in lines if x.endswith("ranks")] == ["8 ranks", "16 ranks"]
    rows = [x for x in lines if x.strip().startswith(("1,024 ", "1,048,576 "))]
    assert len(rows) == 4 and all(row.count("*") == 1 for row in rows)
    assert " 19.9 " in rows[0], "the ring at 1 KB, which was fitted to NCCL's"


def test_the_command_imports_a_users_schedules(tmp_path, monkeypatch, capsys):
    """From the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schedules_of_a_user.py").write_text("""
from kos.comm.schedules.registry import algorithm
from kos.comm.schedules.schedule import Moves
@algorithm("broadcast", "line", ordered=True)
def line(n, c, root):
    '''Each rank sends to the next one.'''
    for k in range(n - 1):
        yield [Moves((root + k) % n, (root + k + 1) % n, 0, count=c)]
""")
    before = [*sys.path]
    command = ["--import", "schedules_of_a_user", "--collective", "broadcast"]
    try:
        assert main(command) == 0
        assert "  line              Each rank sends to the next one." in capsys.readouterr().out
        assert main([*command, "line", "--ranks", "3", "--root", "1"]) == 0
        assert "1 -> 2  data[0]" in (out := capsys.readouterr().out) and "proved right: 2 rounds" in out
    finally:
        registry._REGISTRY["broadcast"].pop("line", None)
    assert sys.path == before


@pytest.mark.parametrize(("text", "problem"), [
    (None, "got 'schedules_gone': ModuleNotFoundError: No module named 'schedules_gone'"),
    ("1 / 0", "got 'schedules_gone': ZeroDivisionError: division by zero"),
    ("from kos.comm.schedules.registry import algorithm\nalgorithm('all_reduce', 'ring')(lambda n: [])",
     "algorithm: expected a name other than auto, ring"),
])
def test_a_module_that_cannot_be_imported(text, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "schedules_gone.py").write_text(text)
    assert main(["--import", "schedules_gone"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("kos: error: ") and said.err.count("\n") == 1 and problem in said.err


@pytest.mark.parametrize("numbers", ["", "0", "8,-1", "1T", "K"])
def test_numbers_are_checked(numbers, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--predict", "--sizes", numbers])
    assert f"--sizes: expected numbers like 8,64 or 1K,4M,1G, got {numbers!r}" in capsys.readouterr().err
