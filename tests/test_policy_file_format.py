"""The policy file: what goes in comes out, and anything else is refused in one line with nothing executed."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser.core import REQUEST_FEATURES
from faser.policies import learned
from faser.policies.policy_file import (
    MAX_BYTES,
    PolicyFile,
    PolicyFileError,
    array_shapes,
    load,
    save,
    write_atomically,
)


def some_policy(seed: int = 0, hidden: int = 32, **fields: Any) -> PolicyFile:
    rng = np.random.default_rng(seed)
    shapes = array_shapes(hidden)
    return PolicyFile(arrays={k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}, **fields)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(some_policy(), tmp_path / "ppo.pt")
    return tmp_path / "ppo.pt"


def refused(path: Path) -> str:
    """The message of the refusal, which must be one line that names the file."""
    with pytest.raises(PolicyFileError) as caught:
        learned.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert len(message) < 600
    return message


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    """The refusal of the file at `path` after `change` to its content."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    return refused(path)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    policy = some_policy(
        hidden=16,
        max_depth=5,
        max_frontier=2,
        training={"command": "python train/ppo.py", "seed": 3, "models": ["llama2-13b"], "kl": None},
        versions={"numpy": "2"},
        commit="abc",
        evaluation=[{"model": "llama2-13b", "load": 0.5, "learned": 0.6}],
    )
    save(policy, tmp_path / "ppo.pt")
    again = load(tmp_path / "ppo.pt")
    for name, array in policy.arrays.items():
        assert array.dtype == again.arrays[name].dtype == np.float32
        np.testing.assert_array_equal(array, again.arrays[name])
    for field in ("max_depth", "max_frontier", "training", "versions", "commit", "evaluation"):
        assert getattr(again, field) == getattr(policy, field)


def test_loading_twice_gives_independent_arrays(path: Path) -> None:
    first = load(path)
    first.arrays["length_bias"][:] = 7.0
    assert not (load(path).arrays["length_bias"] == 7.0).any()


def test_a_policy_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    policy = some_policy()
    policy.arrays["mix_bias"][3] = np.nan
    with pytest.raises(PolicyFileError, match="mix_bias holds NaN"):
        save(policy, tmp_path / "ppo.pt")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_one_altered_weight_is_found(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    assert "damaged" in refused(path)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert "truncated" in refused(path)


def test_a_damaged_file_never_ends_in_a_traceback(path: Path) -> None:
    data, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(data)
        for at in rng.integers(0, len(data), 20):
            damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            load(path)
        except PolicyFileError as error:
            assert "\n" not in str(error)  # noqa: PT017  # a flip in a weight's low bits may well load


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda _: None, "no such file"),
        (lambda p: p.mkdir(), "not a file"),
        (lambda p: p.write_bytes(b""), "empty"),
        (lambda p: p.write_text("hello"), "no complete zip"),
        (lambda p: p.write_bytes(b"\0" * (MAX_BYTES + 1)), f"larger than {MAX_BYTES}"),
    ],
)
def test_what_is_no_policy_file_is_refused(tmp_path: Path, make: Callable[[Path], object], says: str) -> None:
    make(tmp_path / "x.pt")
    assert says in refused(tmp_path / "x.pt")


class CreatesFile:
    """A pickle of this creates the file `path` when it is loaded by a plain `pickle.load`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["old pickle", "torch zip", "torch legacy", "inside a policy"])
def test_nothing_in_a_file_is_executed(tmp_path: Path, path: Path, kind: str) -> None:
    proof, evil = tmp_path / "executed", CreatesFile(tmp_path / "executed")
    if kind == "old pickle":
        path.write_bytes(pickle.dumps(evil))
    elif kind == "inside a policy":
        torch.save(torch.load(path, weights_only=True) | {"training": {"x": evil}}, path)
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=kind == "torch zip")
    refused(path)
    assert not proof.exists()


def test_the_proof_of_execution_can_fail(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(CreatesFile(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def test_a_zip_bomb_is_refused_before_it_is_unpacked(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", b"\0" * (MAX_BYTES + 1))
    assert "unpacks to" in refused(path)


def test_compressed_parts_are_refused(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as small:
        small.writestr("archive/data.pkl", b"\0" * 100)
    assert "no compression" in refused(path)


def test_another_torch_file_is_refused(path: Path) -> None:
    torch.save({"state_dict": {}}, path)
    assert "no format 'faser-policy'" in refused(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(version=2), "version is 2; this FASER reads 1"),
        (lambda c: c.update(version=True), "version is True; this FASER reads 1"),
        (lambda c: c.update(kind="bandit"), "kind is 'bandit'; this FASER reads 'learned'"),
        (lambda c: c.pop("arrays"), "arrays is absent; dict expected"),
        (lambda c: c["actions"].update(max_depth=8), "max_depth is 8; allowed: 0 to 7"),
        (lambda c: c["actions"].update(max_frontier=2.0), "max_frontier is 2.0; allowed: 0 to 4"),
        (lambda c: c["arrays"].pop("mix_bias"), "'mix_bias' only in this FASER"),
        (lambda c: c["arrays"].update(odd=torch.zeros(1)), "'odd' only in the file"),
        (
            lambda c: c["arrays"].update(length_bias=torch.zeros(9)),
            "length_bias has shape (9,); (8,) expected",
        ),
        (
            lambda c: c["arrays"].update(length_bias=torch.zeros(1).expand(10**12)),
            "length_bias has shape (1000000000000,); (8,) expected",
        ),
        (
            lambda c: c["arrays"].update(length_bias=torch.zeros(8, dtype=torch.float64)),
            "length_bias is torch.float64; torch.float32 expected",
        ),
        (lambda c: c["arrays"].update(length_bias=[0.0] * 8), "length_bias is list; a dense tensor expected"),
        (
            lambda c: c["arrays"].update(length_bias=torch.zeros(8, device="meta")),
            "its pickle names 'torch._utils _rebuild_meta_tensor_no_storage'",
        ),
        (lambda c: c["arrays"]["length_bias"].fill_(float("nan")), "length_bias holds NaN"),
        (lambda c: c["arrays"]["mix_weight"][0].fill_(float("inf")), "mix_weight holds NaN or infinity"),
        (lambda c: c["normaliser"]["load_scale"].zero_(), "a scale is 0"),
        (
            lambda c: c["observation"]["requests"].pop(),
            f"{len(REQUEST_FEATURES) - 1} requests features in the file, {len(REQUEST_FEATURES)} in this FASER",
        ),
        (
            lambda c: c["observation"]["requests"].__setitem__(0, "mood"),
            "requests[0] is 'mood' in the file, 'confidence_1' in this FASER",
        ),
        (lambda c: c["observation"].update(sha256="0"), "sha256 is '0'"),
        (lambda c: c["training"].update(x=torch.zeros(1)), "a Tensor in its description"),
        (lambda c: c["evaluation"].extend([0] * 30_000), "more than 20000 values"),
    ],
)
def test_wrong_content_is_refused_with_both_sides(
    path: Path, change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    assert says in rewritten(path, change)


def test_a_small_file_that_unfolds_without_end_is_refused(path: Path) -> None:
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    assert "more than 20000 values" in rewritten(path, lambda c: c.update(evaluation=nested))


def test_a_storage_smaller_than_its_declared_shape_is_refused(path: Path) -> None:
    """The shape is in the pickle and the bytes are beside it; here they disagree."""
    source, target = zipfile.ZipFile(io.BytesIO(path.read_bytes())), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as out:
        for name in source.namelist():
            data = source.read(name)
            out.writestr(name, data[:4] if "/data/" in name else data)
    path.write_bytes(target.getvalue())
    assert "not a policy file" in refused(path)
