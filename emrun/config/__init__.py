"""From YAML text to a plan of what will be built; nothing of the user's is called here.

Read `yaml_tree` (text to nodes with positions), `config` (files, `extends`, overrides, interpolation), `sections` (what
a config may hold), then `planner` (names to recipes). `source_finder` reads classes as text, without importing torch.

May import: the root of emrun.
"""
