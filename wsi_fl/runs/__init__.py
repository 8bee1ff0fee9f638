"""Run directories: what a training leaves on the disks of its sites."""
