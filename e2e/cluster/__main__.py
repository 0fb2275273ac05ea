"""Command line: ``python -m e2e.cluster COMMAND``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from e2e.cluster import build, cleanup, exports, images, lifecycle, overview, packages
from e2e.cluster.errors import ClusterError
from e2e.cluster.paths import state_folder, state_root
from e2e.cluster.state import StateFolder, all_folders
from e2e.cluster.versions import Mode

_DESCRIPTION = """A real Kubernetes cluster on this machine, for tests: built from Go modules, no Docker, no registry.

  python -m e2e.cluster build            once: all programs into the cache (about 10 minutes cold on 2 cores, then nothing)
  python -m e2e.cluster up               as root: one node, 16 virtual devices, KubeRay, Kueue
  export KUBECONFIG=$(python -m e2e.cluster kubeconfig)
  kubectl get nodes
  python -m e2e.cluster down             stops and removes all of it

  python -m e2e.cluster api --crds       only an API server, in seconds, without root; several at once with --name
  python -m e2e.cluster image operator   build localhost/rljob-operator:<content> and put it on the node

Another cluster can be used instead through KUBECONFIG if its context is rljob-e2e, kind-*, k3d-* or minikube, or is named in
RLJOB_E2E_CONTEXTS. RLJOB_E2E_CACHE and RLJOB_E2E_STATE choose where binaries and running state lie."""

DEFAULT_NAME = "cluster"
DEFAULT_API_NAME = "api"


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(
        prog="python -m e2e.cluster", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, *, default_name: str | None = DEFAULT_NAME) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        if default_name is not None:
            command.add_argument("--name", default=default_name, help="which cluster of this machine (default: %(default)s)")
        return command

    built = add("build", "build what is not in the cache yet; needs Go", default_name=None)
    built.add_argument("--mode", type=Mode, choices=list(Mode), default=Mode.CLUSTER, help="what to build for (default: %(default)s)")
    add("up", "start a whole cluster (as root); nothing if it runs")
    api = add("api", "start etcd, API server and controller manager; nothing if they run", default_name=DEFAULT_API_NAME)
    api.add_argument("--crds", action="store_true", help="install KubeRay's CRDs and RLJob's own")
    add("status", "what runs, where it listens and logs, nodes and pods; exit code 1 if not all is well")
    down = add("down", "stop exactly what was started and remove what was made; does nothing the second time")
    down.add_argument("--all", action="store_true", help="every cluster of this user, API servers of running tests included")
    down.add_argument("--keep-logs", type=Path, metavar="DIR", help="put the last MiB of each log there")
    load = add("load", "put an image of buildah's store on the node")
    load.add_argument("image", help="for example localhost/rljob-operator:0.1.0")
    image = add("image", "build an image unless its content is unchanged, put it on the node if one is up, and print its name")
    image.add_argument("target", choices=images.TARGETS, help="base: Debian with Python; the others: targets of the Dockerfile")
    image.add_argument("--stock", action="store_true", help="only have it unpacked in the cache, where the nodes of later clusters begin")
    add("kubeconfig", "print the path of the kubeconfig")
    add("exports", "print shell commands that set what the scenarios of e2e need; builds the images unless their content is unchanged")
    binary = add("binary", "print the path of a program in the cache, for example kubectl", default_name=None)
    binary.add_argument("program")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return _run(arguments)
    except (ClusterError, OSError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "build":
        build.build(arguments.mode, _say)
        return 0
    if arguments.command == "binary":
        print(build.binary(arguments.program))
        return 0
    folder = StateFolder(path=state_folder(arguments.name))
    started_s = time.monotonic()
    match arguments.command:
        case "up":
            packages.require_root()
            build.build(Mode.CLUSTER, _say)
            lifecycle.up(folder, say=_say)
            _say(f"up after {time.monotonic() - started_s:.1f} s")
            print(f"export KUBECONFIG={folder.kubeconfig}")
        case "api":
            build.build(Mode.API, _say)
            lifecycle.api(folder, with_crds=arguments.crds, say=_say)
            _say(f"up after {time.monotonic() - started_s:.1f} s")
            print(f"export KUBECONFIG={folder.kubeconfig}")
        case "status":
            text, well = overview.overview(folder)
            print(text)
            return 0 if well else 1
        case "down":
            for each in all_folders(state_root()) if arguments.all else [folder]:
                was_there = cleanup.down(each, keep_logs=arguments.keep_logs)
                _say(f"{each.path.name}: " + (f"down after {time.monotonic() - started_s:.1f} s" if was_there else "nothing there"))
        case "load":
            images.load(folder, arguments.image, _say)
        case "image":
            print(images.image(arguments.target, folder, _say, stocked=arguments.stock))
        case "kubeconfig":
            folder.require()
            print(folder.kubeconfig)
        case "exports":
            print(exports.as_shell(exports.variables(folder, _say)))
    return 0


def _say(text: str) -> None:
    """Progress goes to stderr, results to stdout."""
    print(f"[cluster] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
