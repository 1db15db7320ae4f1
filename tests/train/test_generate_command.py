"""``kos sample`` with several prompts and limits, ``kos chat``, and what a model's folder says of ends and chats."""

import io
import json
import subprocess
import sys

import pytest

import kos.train
from kos.errors import CheckpointError, DataError
from kos.train import chat, checkpoint, sample
from kos.train.data.tokenizers import ByteTokenizer
from tests.forked import python
from tests.train.runs import _train

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    _train(text, out, steps=2, tokenizer="bytes", seq_len=128)
    return out


@pytest.fixture
def folder(run):
    """The run's checkpoint, with a chat template while a test runs."""
    pytest.importorskip("jinja2", reason="needs the extra 'chat'")
    found = checkpoint.find(run).path
    (found / "chat_template.jinja").write_text(TEMPLATE)
    yield found
    for name in ("chat_template.jinja", "generation_config.json"):
        (found / name).unlink(missing_ok=True)


def test_several_prompts(run, tmp_path, said):
    model = kos.train.load(run)
    (tmp_path / "prompts.txt").write_text("the ring\none é\n")
    flags = [run, "--prompt", "a", "--prompt=b", "--prompts", tmp_path / "prompts.txt", "--tokens", "9"]
    flags += ["--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2", "--top-k=5", "--seed=4", "--stop=q"]
    how = {"top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "top_k": 5, "seed": 4, "stop": ["q"]}
    texts = model.generate(["a", "b", "the ring", "one é"], 9, **how)
    expected = "".join(f"--- {number} ---\n{each}\n" for number, each in enumerate(texts, 1))
    assert said(sample.main, *flags) == (0, expected, "")


@pytest.fixture
def said(capsys, monkeypatch):
    """The exit code of a command, to which somebody types, and what it prints."""

    def call(main, *words, typed=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        capsys.readouterr()
        return main([*map(str, words)]), *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--top-p", "0"], "--top-p: expected more than 0, at most 1, got 0.0"),
        (["--temperature", "nan"], "--temperature: expected 0 or more"),
        (["--stop", ""], "--stop: expected a list of texts that are not empty, got ['']"),
        (["--device", "tpu"], "device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (["--prompt", "r" * 129], "--prompt: expected at most 128 tokens, the model's context, got 129"),
        (["--prompts", "nowhere.txt"], "--prompts: expected a file of text, got "),
    ],
)
def test_what_is_refused_in_one_line(run, said, flags, expected):
    code, out, err = said(sample.main, run, *flags)
    assert code == 2 and err.startswith(f"kos: error: {expected}") and err.count("\n") == 1 and not out


def test_end_tokens_are_those_of_generation_config(folder):
    """Beside the tokenizer's; a damaged file is refused by its name."""
    model = kos.train.load(folder)
    ids = list(ByteTokenizer().encode(model.generate("ring", 30, temperature=0)))
    assert model.ends == ()
    for given in (int(ids[9]), [int(ids[9]), 300]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
        again = kos.train.load(folder)
        expected = ids[: ids.index(ids[9], 4)]
        assert list(ByteTokenizer().encode(again.generate("ring", 30, temperature=0))) == expected
    (folder / "generation_config.json").write_text("{}")
    assert kos.train.load(folder).ends == ()
    for bad in ("[", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [[]]}'):
        (folder / "generation_config.json").write_text(bad)
        with pytest.raises(CheckpointError, match="generation_config.json: expected "):
            kos.train.load(folder)


def test_a_chat_is_what_follows_the_template(folder):
    model, pieces = kos.train.load(folder), list[str]()
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    messages.append({"role": "user", "content": "three"})
    prompt = "<user>one</s>\n<assistant>two</s>\n<user>three</s>\n<a>"
    assert model.chat_prompt(messages) == (prompt, "</s>\n")
    answer = model.chat(messages, 12, temperature=0, on_text=pieces.append)
    assert answer == model.generate(prompt, 12, temperature=0)[len(prompt) :].partition("</s>")[0] == "".join(pieces)
    stop = answer[3:5]
    assert model.chat(messages, 12, temperature=0, stop=[stop]) == answer.partition(stop)[0]
    for wrong in ({"role": "nobody", "content": "x"}, {"role": "user"}):
        with pytest.raises(DataError, match="chat: expected "):
            model.chat([wrong])
    with pytest.raises(DataError, match="chat: expected a chat template that uses tools"):
        model.chat(messages, tools=[{"name": "weather"}])
    (folder / "chat_template.jinja").write_text("{% for tool in tools %}[{{ tool.name }}]{% endfor %}" + TEMPLATE)
    model = kos.train.load(folder)
    assert model.chat_prompt(messages, [{"name": "weather"}])[0] == "[weather]" + prompt
    assert model.chat(messages, 3, tools=[{"name": "weather"}], temperature=0) is not None


def test_a_turn_that_the_template_ends_ends_the_answer(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("</s>", "e"))  # which the model says
    model = kos.train.load(folder)
    question = [{"role": "user", "content": "the ring"}]
    prompt, _ = model.chat_prompt(question)
    for seed in range(5):
        whole = model.generate(prompt, 40, seed=seed, top_k=0)[len(prompt) :]
        assert model.chat(question, 40, seed=seed, top_k=0) == whole.partition("e")[0]


def test_the_command_chats(folder):
    """Several turns, a new chat, an empty line, the end of the input."""
    model = kos.train.load(folder)
    system, said = [{"role": "system", "content": "s"}], []
    for line in ("ring", "one", "/reset", "ring"):
        if line == "/reset":
            system = system[:1]
            continue
        system.append({"role": "user", "content": line})
        said.append(model.chat(system, 7, temperature=0))
        system.append({"role": "assistant", "content": said[-1]})
    command = [*python(), "-m", "kos", "chat", str(folder), "--tokens=7", "--temperature=0", "--system=s"]
    lines = "ring\none\n\n/reset\nring\n"
    for ending in ("/exit\nmore", ""):
        done = subprocess.run(command, input=lines + ending, capture_output=True, text=True, timeout=200)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.replace("> ", "").rstrip("\n").split("\n") == "\n".join(said).rstrip("\n").split("\n")


def test_the_command_takes_results_of_tools(folder, said):
    """Their lines up to an empty one are one message, with the name of the tool for templates that write it.

    The end of the program is not the end of a result, which is not sent then.
    """
    names = "{% for m in messages if m.name %}[{{ m.name }}]{% endfor %}"
    (folder / "chat_template.jinja").write_text(names + TEMPLATE)
    model, given, messages = kos.train.load(folder), list[str](), list[dict[str, str]]()
    result = {"role": "tool", "content": "{\n  rank"}
    for message in ({"role": "user", "content": "ring"}, {**result, "name": "clock"}, result):
        messages.append(message)
        given.append(model.chat(messages, 7, temperature=0))
        messages.append({"role": "assistant", "content": given[-1]})
    lines = "ring\n/tool clock\n{\n  rank\n\n/tool\n{\n  rank"
    for ending, answers in (("\n\n/exit\n", given), ("", given[:-1]), ("\n/exit\n\nring\n", given[:-1])):
        code, out, _ = said(chat.main, folder, "--tokens=7", "--temperature=0", typed=lines + ending)
        printed, expected = out.replace("> ", "").splitlines(), (line for text in answers for line in text.splitlines())
        assert code == 0 and [*filter(None, printed)] == [*filter(None, expected)]


def test_the_command_passes_tools_to_the_template(folder, tmp_path, said):
    shown = "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}"
    (folder / "chat_template.jinja").write_text(shown + TEMPLATE)
    tools, messages = [{"name": "weather"}, {"name": "time"}], [{"role": "user", "content": "ring"}]
    (file := tmp_path / "tools.json").write_text(json.dumps(tools))
    model, flags = kos.train.load(folder), ["--tokens=9", "--temperature=0"]
    expected = [model.chat(messages, 9, temperature=0, tools=each) for each in (tools, None)]
    assert expected[0] != expected[1], "else this shows nothing"
    for more, answer in ((["--tools", str(file)], expected[0]), ([], expected[1])):
        code, out, _ = said(chat.main, folder, *flags, *more, typed="ring\n")
        assert code == 0 and out.replace("> ", "").rstrip("\n") == answer.rstrip("\n")
    wrong = {"{}": "expected a list of tools, got {}", "[": "expected a file with JSON, got Expecting"}
    for content, error in wrong.items():
        file.write_text(content)
        code, _, err = said(chat.main, folder, *flags, "--tools", file)
        assert code == 2 and err.startswith(f"kos: error: --tools: {error}")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    file.write_text(json.dumps(tools))
    code, _, err = said(chat.main, folder, *flags, "--tools", file)
    assert code == 2 and "expected a chat template that uses tools" in err


def test_a_line_that_the_tokenizer_refuses(folder, said):
    """It is left out of the chat, which goes on."""
    expected = kos.train.load(folder).chat([{"role": "user", "content": "ring"}], 7, temperature=0)
    code, out, err = said(chat.main, folder, "--tokens=7", "--temperature=0", typed="\ud800\nring\n")
    assert err.startswith("kos: error: tokenizer bytes: expected text, got") and err.count("\n") == 1
    assert code == 0 and out.replace("> ", "").rstrip("\n") == expected.rstrip("\n")


def test_chats_that_cannot_begin(run, folder, said):
    error = "kos: error: --top-p: expected more than 0, at most 1, got 7.0\n"
    assert said(chat.main, folder, "--top-p", "7", typed="hi\n")[::2] == (2, error)
    (folder / "chat_template.jinja").unlink()
    error = f"chat: expected a chat template in {folder}, got none; add chat_template.jinja\n"
    assert said(chat.main, run, typed="hi\n") == (2, "", f"kos: error: {error}")
    code, _, err = said(chat.main, run / "nowhere", typed="hi\n")
    assert code == 2 and "expected a checkpoint or a run" in err
