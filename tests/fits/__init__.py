"""Constants that are fitted on measured runs, each by a script that can be run again."""
