"""Turns YAML text into a plan of the objects to build; no code of the user is called here.

A config is read, planned and built. Reading: `yaml_tree` (text to nodes with positions), `config` (files and
`extends`), `overrides`, `interpolation`. Planning: `sections` (the allowed sections), `planner` (a `Recipe` for each
class, `calls` checked against signatures) and `plan` (the config as a whole). Two finders look up classes:
`source_finder` reads them from source files (`source_modules`) without importing torch; `import_finder` imports them.
Building is one method of `recipe`.

May import: the root, `base`.
"""
