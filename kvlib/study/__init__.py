"""The frozen study: partitions, arms, selection, records. Needs the packages of requirements.txt."""
