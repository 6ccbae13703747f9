"""The only room that touches files.

`files` reads and writes text and bytes. `schema` turns plain data into dataclasses and back;
`yaml_files` and `json_files` do this for files. `presets` finds models, machines and clusters
by name, `hf` reads models of Hugging Face, and `package_data` reads what ships in the
package. `journal` keeps results of unfinished work. `logs` reads the logs of other benchmarks,
and `operating_system` asks for drivers, variables and processes.
"""
