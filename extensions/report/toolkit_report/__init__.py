"""Reports of runs: `toolkit report`, the page and the plot that every run writes, and the energy it used."""

from toolkit.extension import Command, Extension

EXTENSION = Extension(
    commands={
        "report": Command(
            "toolkit_report.command",
            "write a page about one or several runs",
            positionals=("run_dirs",),
            after="finetune_lora",
            takes_list=True,
        )
    },
    run_callbacks={"before": "toolkit_report.energy.make_energy", "outputs": "toolkit_report.callback.make_report"},
)
