"""`toolkit verify`: verify the checksums of checkpoints."""

from __future__ import annotations


def setup(checkpoint_dir: str) -> None:
    """Verify all files of a checkpoint, or of all checkpoints of a run, and list the damaged ones.

    The exit code is 0 if all are intact, and 2 otherwise.

    Args:
        checkpoint_dir: A checkpoint folder, a name below checkpoints/, or the out_dir of a run.
    """
    from pathlib import Path

    from toolkit.checkpoints.manifest import COMPLETE, read_manifest
    from toolkit.checkpoints.store import WEIGHTS, is_complete, newest_first
    from toolkit.checksums import find_damage
    from toolkit.errors import UserError

    given = Path(checkpoint_dir).expanduser()
    given = given if given.is_dir() else Path("checkpoints") / given
    folders = [given] if is_complete(given) else sorted(newest_first(given))
    if not folders:
        is_model = (given / WEIGHTS).exists()
        why = f"has no checksums (no file {COMPLETE})" if is_model else "no complete checkpoint there"
        raise UserError(f"checkpoint_dir {checkpoint_dir}: {why}; give the folder of a checkpoint or of a run")
    failed = []
    for folder in folders:
        try:
            files = read_manifest(folder)
        except UserError as error:
            print(error)
            failed.append(folder)
            continue
        if files is None:
            print(f"{folder}: has no checksums (empty COMPLETE of an older version)")
            failed.append(folder)
        elif damage := find_damage(folder, files):
            print(*(f"{folder / name}: {why}" for name, why in damage.items()), sep="\n")
            failed.append(folder)
        else:
            print(f"{folder}: intact, {len(files)} files, {sum(f['size'] for f in files.values()):,} bytes")
    if failed:
        names = ", ".join(folder.name for folder in failed)
        raise UserError(f"checkpoint_dir {checkpoint_dir}: {len(failed)} of {len(folders)} not verified: {names}")
