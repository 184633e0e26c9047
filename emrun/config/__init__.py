"""From YAML text to a plan of what will be built; nothing of the user's is called here.

A config is read, planned and built. Reading: `yaml_tree` (text to nodes with positions), `config` (files and what they
extend), `overrides`, `interpolation`. Planning: `sections` (what a config may hold), `planner` (names to a `Recipe`
each, `calls` against signatures) and `plan` (the config as a whole). Two finders find the names: `source_finder` reads
classes as text, file by file (`source_modules`), without importing torch; `import_finder` imports them. Building is one
method, of `recipe`.

May import: the root of emrun.
"""
