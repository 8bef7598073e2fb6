"""Paths, archives, git repositories and packages; what cannot be had is one clear line."""

import io
import json
import subprocess
import tarfile
import zipfile

import projects
import pytest

from logitless.cli import main
from logitless.source_audit.targets import resolve


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path / "cache"))
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Nobody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "nobody@example.invalid")


def one_line_of_error(captured):
    (line,) = captured.err.splitlines()
    assert line.startswith("logitless inspect: error: ")
    return line


def git(folder, *words):
    done = subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def repository(folder, text):
    projects.write(folder, model=text)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def zipped(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def tarred(path, *members):
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_a_folder_in_a_repository_has_its_revision(tmp_path):
    folder = repository(tmp_path / "project", projects.LOGITS)
    assert resolve(str(folder)).revision == git(folder, "rev-parse", "--short", "HEAD")
    (folder / "more.py").write_text("x = 1\n")
    assert resolve(str(folder)).revision.endswith("+changes")


def test_a_git_url_is_cloned_and_pinned(tmp_path, capsys):
    folder = repository(tmp_path / "project", projects.CHUNKED)
    first = git(folder, "rev-parse", "--short", "HEAD")
    assert main(["inspect", f"file://{folder}", "--json"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert (target["kind"], target["name"], target["revision"]) == ("git", "project", first)
    assert [entry["verdict"] for entry in target["entries"]] == ["head fused, chunked"]
    git(folder, "tag", "v1")
    projects.write(folder, model=projects.LOGITS)
    git(folder, "commit", "--quiet", "-am", "second")
    assert resolve(f"file://{folder}").revision == git(folder, "rev-parse", "--short", "HEAD")
    assert resolve(f"git+file://{folder}@v1").revision == first
    assert resolve(f"file://{folder}@{git(folder, 'rev-parse', 'v1')}").revision == first


def test_compare_shows_what_changed(tmp_path, capsys):
    before = projects.write(tmp_path / "a", model=projects.HOLDS + projects.CHUNKED, same=projects.LOGITS)
    after = projects.write(
        tmp_path / "b",
        model="\n\n" + projects.HOLDS.replace("x @ w.t()", "x.clone()").replace("(x, w, y)", "(x, y)"),
        same=projects.LOGITS,
        new=projects.SCAN,
    )
    assert main(["inspect", str(before), str(after), "--compare"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[1]: line for line in out.splitlines() if line.split()[:1] and line.split()[0] in WHAT}
    assert rows["linear_loss"].split()[0] == "changed"
    assert "takes hidden states, holds all logits" in rows["linear_loss"]
    assert "logits-level" in rows["linear_loss"]
    assert rows["chunked_loss"].split()[0] == "removed"
    assert rows["scanned_loss"].split()[0] == "added"
    assert "causal_loss" not in out
    assert main(["inspect", str(before), str(before), "--compare"]) == 0
    assert "no answer changed" in capsys.readouterr().out


WHAT = ("changed", "added", "removed")


def test_markdown_has_the_revision_at_its_top(tmp_path, capsys):
    folder = repository(tmp_path / "project", projects.CHUNKED)
    assert main(["inspect", f"file://{folder}", "--markdown", "--show"]) == 0
    page = capsys.readouterr().out
    head, _, body = page.partition("## ")
    assert git(folder, "rev-parse", "--short", "HEAD") in head
    assert "| chunked_loss | model.py:5 | cross-entropy | head fused, chunked | model.py:8 |" in body
    assert "for start in range(0, hidden.shape[0], size):" in body


def test_show_prints_the_lines(tmp_path, capsys):
    assert main(["inspect", str(projects.write(tmp_path / "p", model=projects.HOLDS)), "--show"]) == 0
    out = capsys.readouterr().out
    assert "model.py:5" in out
    assert "scores = x @ w.t()" in out


def test_a_config_names_targets(tmp_path, capsys):
    folder = projects.write(tmp_path / "p", model=projects.HOLDS)
    config = tmp_path / "inspect.yaml"
    config.write_text(f"targets: [{folder}]\nformat: json\n")
    assert main(["inspect", str(config)]) == 0
    assert json.loads(capsys.readouterr().out)["targets"][0]["entries"][0]["name"] == "linear_loss"
    config.write_text(f"target: [{folder}]\n")
    assert main(["inspect", str(config)]) == 2
    assert "target" in one_line_of_error(capsys.readouterr())


def test_a_wheel_is_unpacked_and_hashed(tmp_path):
    wheel = zipped(tmp_path / "x-1.0-py3-none-any.whl", {"x/a.py": projects.LOGITS, "x/b.txt": "no"})
    target = resolve(str(wheel))
    assert target.kind == "archive"
    assert len(target.sha256) == 64
    assert [path.relative_to(target.root).as_posix() for path in target.root.rglob("*.*")] == ["x/a.py"]


ESCAPES = {
    "dots": lambda path: zipped(path.with_suffix(".zip"), {"ok.py": "x = 1\n", "../../out.py": "x = 1\n"}),
    "absolute": lambda path: zipped(path.with_suffix(".zip"), {"/tmp/out.py": "x = 1\n"}),
    "drive": lambda path: zipped(path.with_suffix(".zip"), {"C:\\out.py": "x = 1\n"}),
    "tar dots": lambda path: tarred(path.with_suffix(".tar.gz"), (tarfile.TarInfo("a/../../out.py"), b"x = 1\n")),
    "link": lambda path: tarred(path.with_suffix(".tar.gz"), (_link("a/l.py", "../../out.py"), b"")),
    "absolute link": lambda path: tarred(path.with_suffix(".tar.gz"), (_link("l.py", "/etc/passwd"), b"")),
    "hard link": lambda path: tarred(path.with_suffix(".tar.gz"), (_link("l.py", "../out.py", hard=True), b"")),
}


def _link(name, target, *, hard=False):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.LNKTYPE if hard else tarfile.SYMTYPE, target
    return member


@pytest.mark.parametrize("make", ESCAPES.values(), ids=ESCAPES)
def test_an_archive_that_writes_outside_its_folder_is_refused(make, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    archive = make(tmp_path / "in" / "bad")
    assert main(["inspect", str(archive)]) == 2
    line = one_line_of_error(capsys.readouterr())
    assert "refused" in line
    assert "outside its folder" in line
    assert not list(tmp_path.rglob("out.py"))


def broken_zip(folder):
    path = folder / "broken.whl"
    path.write_bytes(b"PK\x03\x04 not a zip")
    return path


def no_source(folder):
    return zipped(folder / "data-1.0-py3-none-any.whl", {"data/x.txt": "no python"})


def empty(folder):
    (folder / "empty").mkdir()
    return folder / "empty"


BAD = {
    "missing": (lambda folder: folder / "nowhere", "no such file or folder"),
    "empty folder": (empty, "holds no Python file"),
    "broken archive": (broken_zip, "the archive is broken"),
    "no source": (no_source, "holds no Python source"),
    "no repository": (lambda folder: f"file://{folder}/none.git", "git cannot fetch it"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_exit_2(make, message, tmp_path, capsys):
    assert main(["inspect", str(make(tmp_path))]) == 2
    captured = capsys.readouterr()
    assert message in one_line_of_error(captured)
    assert captured.out == ""


def test_a_bad_target_does_not_stop_the_rest(tmp_path, capsys):
    good = projects.write(tmp_path / "good", model=projects.HOLDS)
    assert main(["inspect", str(tmp_path / "nowhere"), str(good)]) == 2
    captured = capsys.readouterr()
    assert "linear_loss" in captured.out
    assert "nowhere" in one_line_of_error(captured)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name at least one"),
        (["a", "--compare"], "two targets"),
        (["a", "--json", "--markdown"], "exclude each other"),
        (["a", "--jsn"], "unknown option --jsn"),
    ],
)
def test_words_that_make_no_sense(words, message, capsys):
    assert main(["inspect", *words]) == 2
    assert message in one_line_of_error(capsys.readouterr())


def test_help(capsys):
    assert main(["inspect", "--help"]) == 0
    assert "TARGET" in capsys.readouterr().out
