"""Run directories: the files of a training on the disks of its sites."""
