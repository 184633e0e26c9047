"""Trains the language model with which the preferences begin."""

from emrun import create_training

create_training("base.yaml", output_dir="log/base").main_loop.run_training()
