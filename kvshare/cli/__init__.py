"""
The `kvshare` command. `main` wires; one file per group of commands; `options` and `traffic_options` have what
they can be given; `views` draws, `store` asks; `plugins` finds the commands of other distributions, such as
kvshare-lab.

Importing a command module costs nothing heavy: settings, rich, torch and HTTP are imported when a command
runs, so that `kvshare --help` stays fast.
"""
