"""Which config does a command line mean, and how is a file replaced?"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from callboard.cli.autoplace.outputs import replace_file, write_new
from callboard.cli.layouts import config_source
from callboard.cli.layouts.config_source import config_names, load_config
from callboard.cli.show.exits import BAD_INPUT, CommandFailed
from callboard.model.faults import InvalidInput


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text("cluster:\n  num_nodes: 1\ndata:\n  rollout_batch_size: 64\n")
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "big.yaml").write_text("a: 1\n")
    (tmp_path / "train.yaml").write_text(
        "defaults:\n  - base\n  - override hydra/job_logging: stdout\n  - _self_\n"
        "data:\n  rollout_batch_size: 128\n  twice: ${data.rollout_batch_size}\nodd: ${unheard_of:1}\n"
    )
    return tmp_path


class TestWhichConfig:
    def test_a_file_is_read_as_it_is_with_its_lines(self, folder: Path) -> None:
        source = load_config(str(folder / "base.yaml"), None)
        assert source.config == {"cluster": {"num_nodes": 1}, "data": {"rollout_batch_size": 64}}
        assert not source.composed
        assert source.text.startswith("cluster:")

    @pytest.mark.parametrize("by_name", [True, False])
    def test_defaults_are_composed_and_the_own_values_win(self, folder: Path, by_name: bool) -> None:
        source = load_config("train", folder) if by_name else load_config(str(folder / "train.yaml"), None)
        assert source.composed
        assert source.config["cluster"]["num_nodes"] == 1
        assert source.config["data"]["rollout_batch_size"] == 128
        assert source.config["data"]["twice"] == 128
        assert source.file == folder / "train.yaml"

    def test_defaults_without_self_are_composed_without_a_warning(self, folder: Path) -> None:
        """RLinf's configs are written so. A warning would fail this test."""
        (folder / "plain.yaml").write_text("defaults:\n  - base\nseed: 7\n")
        config = load_config("plain", folder).config
        assert (config["seed"], config["cluster"]["num_nodes"]) == (7, 1)

    def test_a_search_path_may_come_from_the_environment(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = tmp_path / "elsewhere" / "env"
        other.mkdir(parents=True)
        (other / "sim.yaml").write_text("total_num_envs: 16\n")
        (folder / "robot.yaml").write_text(
            "defaults:\n  - env/sim@env.train\n  - _self_\nhydra:\n  searchpath:\n    - file://${oc.env:ELSEWHERE}\n"
        )
        monkeypatch.delenv("ELSEWHERE", raising=False)
        with pytest.raises(InvalidInput, match="ELSEWHERE"):
            load_config("robot", folder)
        monkeypatch.setenv("ELSEWHERE", str(tmp_path / "elsewhere"))
        assert load_config("robot", folder).config["env"]["train"]["total_num_envs"] == 16

    def test_interpolations_of_one_file_are_resolved(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("a: {b: 3}\nc: ${a.b}\nd: ${unheard_of:1}\n")
        assert load_config(str(file), None).config["c"] == 3

    def test_a_whole_path_wins_over_the_folder_beside_it(self, folder: Path, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        assert load_config(str(folder / "train.yaml"), elsewhere).config["data"]["twice"] == 128

    def test_a_link_has_the_defaults_of_the_folder_that_it_is_in(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "store").mkdir()
        (folder / "train.yaml").rename(tmp_path / "store" / "real.yaml")
        (folder / "linked.yaml").symlink_to(tmp_path / "store" / "real.yaml")
        assert load_config("linked", folder).config["cluster"]["num_nodes"] == 1

    def test_names_are_those_of_the_folder(self, folder: Path) -> None:
        assert config_names(folder) == ["base", "math/big", "train"]
        assert load_config("math/big", folder).config == {"a": 1}

    def test_an_unknown_name_is_told_what_is_similar(self, folder: Path) -> None:
        with pytest.raises(CommandFailed) as caught:
            load_config("trian", folder)
        assert "train" in caught.value.failure.why
        assert caught.value.failure.exit_code == BAD_INPUT

    def test_a_name_without_a_folder_is_told_about_it(self) -> None:
        with pytest.raises(CommandFailed) as caught:
            load_config("train", None)
        assert "--config-path" in caught.value.failure.remedy

    def test_a_default_that_is_missing_is_a_fault_of_the_file(self, folder: Path) -> None:
        (folder / "lame.yaml").write_text("defaults:\n  - nowhere\n  - _self_\n")
        with pytest.raises(InvalidInput, match="nowhere"):
            load_config("lame", folder)

    @pytest.mark.parametrize("hydra", [True, False])
    def test_settings_that_lie_elsewhere_are_left_out_with_a_word(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hydra: bool
    ) -> None:
        """RLinf's embodied configs, outside of RLinf's folders: what they say of placement stands in them."""
        monkeypatch.delenv("EMBODIED_PATH", raising=False)
        if not hydra:
            monkeypatch.setattr(config_source, "find_spec", lambda name: None)
        file = tmp_path / "ppo.yaml"
        file.write_text(
            "defaults:\n  - env/libero@env.train\n  - model@actor.model: pi0\n  - override hydra/job_logging: stdout\n"
            "hydra:\n  searchpath:\n    - file://${oc.env:EMBODIED_PATH}/config/\n"
            "cluster:\n  num_nodes: 2\n"
        )
        source = load_config(str(file), None)
        assert source.config["cluster"]["num_nodes"] == 2
        assert not source.composed
        assert ("EMBODIED_PATH" if hydra else "Hydra") in source.left_out
        if hydra:
            with pytest.raises(InvalidInput, match="EMBODIED_PATH"):
                load_config("ppo", tmp_path)

    @pytest.mark.parametrize("default", ["base", "nodes/big@cluster", "x/y@_global_", "base@algorithm.sizes"])
    def test_defaults_that_a_placement_may_be_read_from_are_not_left_out(self, tmp_path: Path, default: str) -> None:
        file = tmp_path / "ppo.yaml"
        file.write_text(f"defaults:\n  - {default}\n  - env/libero@env.train\ncluster:\n  num_nodes: 2\n")
        with pytest.raises(InvalidInput, match="composed"):
            load_config(str(file), None)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("defaults: [other]\n", "name each other in a circle"),
            ("defaults: [train]\n", "can't be composed"),
            ("defaults: [[1, 2]]\n", "Unsupported type in defaults"),
            ("defaults: [{base: [x, null]}]\n", "Unsupported item value"),
            ("defaults: ['../../etc/passwd']\n", "Could not load"),
        ],
    )
    def test_defaults_that_can_t_be_followed_are_told(self, tmp_path: Path, text: str, said: str) -> None:
        (tmp_path / "train.yaml").write_text(text)
        (tmp_path / "other.yaml").write_text("defaults: [train]\n")
        for name, folder in (("train", tmp_path), (str(tmp_path / "train.yaml"), None)):
            with pytest.raises(InvalidInput, match=said):
                load_config(name, folder)

    def test_without_hydra_a_composed_config_says_what_to_install(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(config_source, "find_spec", lambda name: None)
        with pytest.raises(CommandFailed) as caught:
            load_config("train", folder)
        assert "callboard[hydra]" in caught.value.failure.remedy

    def test_without_hydra_overrides_of_its_own_settings_do_no_harm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """RLinf's reasoning configs begin with one."""
        monkeypatch.setattr(config_source, "find_spec", lambda name: None)
        file = tmp_path / "c.yaml"
        file.write_text("defaults:\n  - override hydra/job_logging: stdout\na: 1\n")
        assert load_config(str(file), None).config["a"] == 1

    def test_what_is_no_yaml_is_told_with_its_line(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("a: 1\nb: [\n")
        with pytest.raises(InvalidInput) as caught:
            load_config(str(file), None)
        assert caught.value.faults[0].line in (2, 3)

    def test_what_is_no_text_is_told(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(CommandFailed, match=r"can't be read"):
            load_config(str(file), None)


class TestReplacing:
    def test_the_old_file_is_kept_beside_the_new_one(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("old")
        backup = replace_file(file, "new")
        assert (file.read_text(), backup.read_text(), backup.name) == ("new", "old", "c.yaml.bak")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "c.yaml.bak"]

    def test_permissions_stay(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("old")
        file.chmod(0o640)
        replace_file(file, "new")
        assert stat.S_IMODE(file.stat().st_mode) == 0o640

    def test_a_link_stays_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real.yaml").write_text("old")
        link = tmp_path / "c.yaml"
        link.symlink_to("real.yaml")
        replace_file(link, "new")
        assert link.is_symlink()
        assert (tmp_path / "real.yaml").read_text() == "new"

    def test_a_write_that_fails_leaves_the_file_as_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("old")

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            replace_file(file, "new")
        assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]
        assert file.read_text() == "old"

    def test_a_new_file_never_overwrites_one(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("old")
        with pytest.raises(FileExistsError):
            write_new(file, b"new")
        assert file.read_text() == "old"
