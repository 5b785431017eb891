"""What every test may use: no network, a two-layer encoder, and optional real data.

Two options (or environment variables) point the tests at data that the repository does not hold:

    --sts-data FOLDER   (GSINFONCE_STS_DATA)  folder of TASK/test.jsonl with the STS sets
    --corpus FILE       (GSINFONCE_CORPUS)    plain text, one sentence a line

Without them the tests that need the data are skipped and say so.

The tests marked ``nightly``, of kills, soaks and mutants, take minutes. They are run by
``pytest -m nightly``, and by no run whose ``-m`` does not name them.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import gc  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import runpy  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from packaging.version import Version  # noqa: E402
from sentence_transformers import (  # noqa: E402
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    __version__,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast  # noqa: E402

if TYPE_CHECKING:
    from st_gsinfonce.materials import GridOptions, Materials

# The tiny encoder gains nothing from threads, and waits for them where other work has the cores.
torch.set_num_threads(1)

# Before 6.2, sentence-transformers carried cached gradients back in float32 whatever the model computed in.
CARRIED_IN_FLOAT32 = Version(__version__) < Version("6.2")

EXAMPLES = Path(__file__).parent.parent / "examples"

NOUNS = "cat dog bird fish horse child woman man teacher river house garden city road train".split()
VERBS = "sees likes follows finds hears helps paints builds watches remembers".split()
ADJECTIVES = "old new small large red green quiet happy wooden distant".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sts-data", default=os.environ.get("GSINFONCE_STS_DATA"))
    parser.addoption("--corpus", default=os.environ.get("GSINFONCE_CORPUS"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "nightly" in config.option.markexpr:
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=nightly)
    items[:] = [item for item in items if item not in nightly]


def pytest_collection_finish() -> None:
    # The Trainer collects garbage at every start: without this it looks through all of torch each time.
    gc.collect()
    gc.freeze()


def _optional_path(value: str | None, what: str) -> Path:
    if not value:
        pytest.skip(f"{what} is not given")
    path = Path(value)
    if not path.exists():
        pytest.skip(f"{what}: {path} does not exist")
    return path


@pytest.fixture(scope="session")
def sts_data(request: pytest.FixtureRequest) -> Path:
    """The folder of real STS sets, or a skip that says how to give it."""
    return _optional_path(request.config.getoption("--sts-data"), "--sts-data/GSINFONCE_STS_DATA")


@pytest.fixture(scope="session")
def corpus_file(request: pytest.FixtureRequest) -> Path:
    """The file of real sentences, or a skip that says how to give it."""
    return _optional_path(request.config.getoption("--corpus"), "--corpus/GSINFONCE_CORPUS")


def make_sentences(count: int, seed: int = 0) -> list[str]:
    """Return ``count`` distinct sentences over the tiny encoder's vocabulary."""
    generator = random.Random(seed)
    sentences: dict[str, None] = {}
    while len(sentences) < count:
        subject, thing = generator.sample(NOUNS, 2)
        words = ["the", generator.choice(ADJECTIVES), subject, generator.choice(VERBS), "the"]
        if generator.random() < 0.5:
            words.append(generator.choice(ADJECTIVES))
        sentences[" ".join([*words, thing])] = None
    return list(sentences)


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """64 distinct short sentences."""
    return make_sentences(64)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a raw two-layer, 32-wide BERT and its tokenizer, as the hub would hold it."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    words = [*SPECIAL, "the", *NOUNS, *VERBS, *ADJECTIVES]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words += letters + [f"##{letter}" for letter in letters]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=64,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
        )
        BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def make_encoder(tiny_bert: Path) -> Callable[..., SentenceTransformer]:
    """Return a factory of fresh tiny encoders on the CPU: ``make_encoder(pooling="mean")``."""

    def make(pooling: str = "cls", max_seq_length: int = 32) -> SentenceTransformer:
        transformer = Transformer(str(tiny_bert), max_seq_length=max_seq_length)
        pool = Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling)
        return SentenceTransformer(modules=[transformer, pool], device="cpu")

    return make


@pytest.fixture(scope="session")
def sts_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the seven tasks need, twelve pairs each."""
    from st_gsinfonce import STS_TASKS

    folder = tmp_path_factory.mktemp("sts")
    splits = [(task, "test") for task in STS_TASKS] + [("STSBenchmark", "validation")]
    for number, (task, split) in enumerate(splits):
        texts = make_sentences(24, seed=100 + number)
        rows = [
            {"sentence1": a, "sentence2": b, "score": len(set(a.split()) & set(b.split())) + i / 99}
            for i, (a, b) in enumerate(zip(texts[:12], texts[12:], strict=True))
        ]
        path = folder / task / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus_of_70(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 70 sentences."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(make_sentences(70)), encoding="utf-8")
    return path


@pytest.fixture
def grid_options(
    tiny_bert: Path, corpus_of_70: Path, sts_tasks: Path, tmp_path: Path
) -> GridOptions:
    """A grid on the tiny encoder that takes seconds; its made-up STS sets raise a UserWarning."""
    from st_gsinfonce.materials import GridOptions

    return GridOptions(
        output=str(tmp_path / "out"),
        model=str(tiny_bert),
        corpus=str(corpus_of_70),
        sts_data=str(sts_tasks),
        batch_size=16,
        learning_rate=1e-3,
        precision="fp32",
        eval_steps=2,
    )


@pytest.fixture
def grid_flags(grid_options: GridOptions) -> list[str]:
    """``grid_options`` of two steps and two seeds, as a script takes them; the output is ``out``."""
    return (
        f"--model {grid_options.model} --corpus {grid_options.corpus} --output out --max-steps 2 "
        f"--sts-data {grid_options.sts_data} --batch-size 16 --precision fp32 --seeds 0-1"
    ).split()


@pytest.fixture
def loaded(grid_options: GridOptions) -> Materials:
    """What ``grid_options`` name, loaded."""
    from st_gsinfonce.materials import load_materials

    return load_materials(grid_options)


RunExample = Callable[..., dict[str, Any]]


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunExample:
    """Return a function that runs a script in an empty folder: ``run_example("x.py", "--flag", 1)``.

    It gives the script's names; with ``name="module"`` the script defines them and does nothing.
    """
    monkeypatch.chdir(tmp_path)

    def run(script: str, *arguments: object, name: str = "__main__") -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        return runpy.run_path(str(EXAMPLES / script), run_name=name)

    return run


TrainingArguments = Callable[..., SentenceTransformerTrainingArguments]


@pytest.fixture
def training_arguments(tmp_path: Path) -> TrainingArguments:
    """Return a factory of quick, quiet CPU arguments whose learning rate moves the tiny encoder."""

    def make(**settings: Any) -> SentenceTransformerTrainingArguments:
        defaults = {
            "output_dir": str(tmp_path / "trainer"),
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "per_device_train_batch_size": 16,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant",
            "max_steps": 4,
            "seed": 0,
        }
        return SentenceTransformerTrainingArguments(**{**defaults, **settings})

    return make


def record_losses(loss: nn.Module) -> list[float]:
    """Return a list to which every training call of a loss module adds its value."""
    values: list[float] = []

    def add(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if torch.is_grad_enabled():
            values.append(output.item())

    loss.register_forward_hook(add)
    return values


def falls(losses: Sequence[float]) -> bool:
    """Say whether the last three steps lost less than half of what the first three did."""
    return sum(losses[-3:]) < 0.5 * sum(losses[:3])


@pytest.fixture
def train(training_arguments: TrainingArguments) -> Callable[..., list[float]]:
    """Return a function that trains by the Trainer and gives the finite losses of its steps.

    It asserts that the encoder moved: ``train(model, loss, dataset, data_collator=..., max_steps=8)``.
    """

    def run(
        model: SentenceTransformer,
        loss: nn.Module | dict[str, nn.Module],
        dataset: Any,
        data_collator: Any = None,
        **settings: Any,
    ) -> list[float]:
        modules = loss if isinstance(loss, dict) else {"": loss}
        values = [record_losses(module) for module in modules.values()]
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer = SentenceTransformerTrainer(
            model=model,
            args=training_arguments(**settings),
            train_dataset=dataset,
            loss=loss,
            data_collator=data_collator,
        )
        trainer.train()
        moved = [not torch.equal(before[n], p) for n, p in model.named_parameters() if n in before]
        assert any(moved)
        losses = [value for of_one in values for value in of_one]
        assert losses and torch.isfinite(torch.tensor(losses)).all()
        return losses

    return run


ENCODE_ELSEWHERE = """
import json, sys, torch
torch.set_num_threads(1)
sys.modules["st_gsinfonce"] = None  # from here on its import fails
answers, sys.stdout = sys.stdout, sys.stderr
from sentence_transformers import SentenceTransformer
for line in sys.stdin:
    request = json.loads(line)
    try:
        model = SentenceTransformer(request["folder"], device="cpu")
        answer = {"vectors": model.encode(request["texts"]).tolist()}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)
"""


@pytest.fixture(scope="session")
def encode_elsewhere() -> Iterator[Callable[[Path | str, Sequence[str]], Tensor]]:
    """Return a function that encodes in a process that cannot import st_gsinfonce.

    ``encode_elsewhere(folder, texts)`` loads the folder with sentence-transformers alone, trusting no
    remote code, and gives the vectors; a failure to load is a RuntimeError.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", ENCODE_ELSEWHERE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def encode(folder: Path | str, texts: Sequence[str]) -> Tensor:
        assert process.stdin and process.stdout
        print(
            json.dumps({"folder": str(folder), "texts": list(texts)}),
            file=process.stdin,
            flush=True,
        )
        answer = json.loads(process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return torch.tensor(answer["vectors"], dtype=torch.float32)

    with process:
        yield encode
        process.terminate()
