"""What a run is made from, as trackers show it."""

from emrun.record.facts import facts_of

CONFIG = """
seed: 3
model:
  module: {class: my.Net, sizes: [1, 2], token: "${env:TOKEN}"}
  optimizer: {lr: 0.1, nesterov: true, none: null}
main_loop:
  extra_streams: [valid, {test: 5 epochs}]
hooks:
  - ComputeStats: {variables: [loss, accuracy]}
  - ShowProgress
  - StopAfter: {epochs: 2}
"""


def test_the_config_is_flat_and_references_stay(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "trace.yaml").write_text("command: [emrun, train, c.yaml]\ngit_commit: abc\nseed: 3\nhost: here\n")
    facts = facts_of(tmp_path)
    assert dict(facts.config) == {
        "seed": 3,
        "model.module.class": "my.Net",
        "model.module.sizes": "[1, 2]",
        "model.module.token": "${env:TOKEN}",
        "model.optimizer.lr": 0.1,
        "model.optimizer.nesterov": True,
        "model.optimizer.none": None,
        "main_loop.extra_streams.valid": "valid",
        "main_loop.extra_streams.test": "5 epochs",
        "hooks.ComputeStats.variables": '["loss", "accuracy"]',
        "hooks.ShowProgress": "ShowProgress",
        "hooks.StopAfter.epochs": 2,
    }
    assert (facts.name, facts.command, facts.seed, facts.host) == (tmp_path.name, "emrun train c.yaml", 3, "here")


def test_a_run_without_files_has_its_name_only(tmp_path):
    facts = facts_of(tmp_path)
    assert (facts.name, facts.config, facts.command, facts.git_commit) == (tmp_path.name, {}, "", None)
