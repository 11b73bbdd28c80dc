//! All checks, the cheapest first; the first that fails ends the run and says what to do.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::mnist_report::MnistReport;
use crate::{mpi, ops, shell, tidy};

/// Which checks to run.
#[derive(Debug, clap::Args)]
pub(crate) struct Ci {
    /// Run this step alone (may be given several times)
    #[arg(long, value_enum, value_name = "STEP")]
    only: Vec<Step>,
    /// Leave this step out (may be given several times)
    #[arg(long, value_enum, value_name = "STEP", conflicts_with = "only")]
    skip: Vec<Step>,
}

/// One check, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Step {
    /// The code is formatted
    Fmt,
    /// What `cargo xtask tidy` checks
    Tidy,
    /// The list of Burn's backend methods is current
    Ops,
    /// Clippy has nothing to say
    Clippy,
    /// The documentation builds without warnings
    Docs,
    /// All tests and doctests pass
    Tests,
    /// Ranks over MPI keep to the contract
    Mpi,
    /// The examples do what the README says
    Examples,
    /// Features that change all of Burn, each in a build of its own
    Features,
}

/// Test packages under `tests/` that turn on features of Burn: each is a workspace with a lock of its own, is built into a
/// folder of its own, and has Burn compiled once more.
pub(crate) const FEATURE_PACKAGES: [&str; 2] = ["distributed", "wgpu"];

/// Runs the chosen steps and prints the time of each.
pub(crate) fn run(args: &Ci) -> Result<()> {
    let mut times = Vec::new();
    for step in steps(args) {
        println!("\n== {}", step.name());
        let start = Instant::now();
        step.run().with_context(|| format!("step {} failed; {}", step.name(), step.advice()))?;
        times.push((step, start.elapsed()));
        println!("== {}: {:.1} s", step.name(), start.elapsed().as_secs_f64());
    }
    println!("\nall checks passed");
    for (step, time) in &times {
        println!("{:>10}  {:>7.1} s", step.name(), time.as_secs_f64());
    }
    println!("{:>10}  {:>7.1} s", "total", times.iter().map(|(_, time)| time.as_secs_f64()).sum::<f64>());
    Ok(())
}

fn steps(args: &Ci) -> Vec<Step> {
    let chosen = |step: &Step| (args.only.is_empty() || args.only.contains(step)) && !args.skip.contains(step);
    Step::value_variants().iter().copied().filter(chosen).collect()
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Step::Fmt => "fmt",
            Step::Tidy => "tidy",
            Step::Ops => "ops",
            Step::Clippy => "clippy",
            Step::Docs => "docs",
            Step::Tests => "tests",
            Step::Mpi => "mpi",
            Step::Examples => "examples",
            Step::Features => "features",
        }
    }

    fn advice(self) -> &'static str {
        match self {
            Step::Fmt => "run `cargo fmt` as above, without `--check`",
            Step::Tidy => "mend what is listed above, or change the rule in xtask/src/tidy with the design",
            Step::Ops => "run `cargo xtask ops`, and list a case for each new method in tests/replica/surface",
            Step::Clippy => "mend the warnings above, or allow one where it stands with a reason",
            Step::Docs => "mend the doc comments named above",
            Step::Tests => "run the failed test alone: `cargo test --release --workspace NAME`",
            Step::Mpi => "run the last command above by hand; without Open MPI and libclang, `--skip mpi`",
            Step::Examples => "run the last command above by hand",
            Step::Features => "run the last command above by hand; if its lock is out of date, without `--locked`",
        }
    }

    /// Every step but the last builds in release mode with the same features, so that Burn is compiled once.
    fn run(self) -> Result<()> {
        let cargo = |args| shell::command("cargo", args);
        match self {
            Step::Fmt => fmt(),
            Step::Tidy => tidy::run(),
            Step::Ops => ops::run(&ops::Ops::CHECK),
            Step::Clippy => {
                shell::run(&mut cargo(&["clippy", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"]))
            }
            Step::Docs => {
                shell::run(cargo(&["doc", "--release", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))
            }
            Step::Tests => shell::run(&mut cargo(&["test", "--release", "--workspace"])),
            Step::Mpi => mpi::run(&mpi::Mpi::all()),
            Step::Examples => examples(),
            Step::Features => features(),
        }
    }
}

fn fmt() -> Result<()> {
    shell::run(&mut shell::command("cargo", &["fmt", "--all", "--check"]))?;
    FEATURE_PACKAGES.iter().try_for_each(|name| {
        let manifest = format!("tests/{name}/Cargo.toml");
        shell::run(&mut shell::command("cargo", &["fmt", "--manifest-path", &manifest, "--check"]))
    })
}

/// One after the other: each build takes all cores.
fn features() -> Result<()> {
    FEATURE_PACKAGES.iter().try_for_each(|name| {
        let (manifest, target) = (format!("tests/{name}/Cargo.toml"), format!("target/{name}"));
        let args = ["test", "--manifest-path", &manifest, "--target-dir", &target, "--locked"];
        shell::run(&mut shell::command("cargo", &args))
    })
}

/// MNIST on one device and on two members agree after one epoch, and so on one rank and several; three epochs reach what
/// the README promises.
fn examples() -> Result<()> {
    const MAX_LOSS_GAP: f64 = 1e-2;
    const MAX_ACCURACY_GAP: f64 = 0.01;
    const PROMISED_ACCURACY: f64 = 0.96;
    /// Of the losses of 20 steps.
    const MAX_STEP_LOSS_GAP: f64 = 1e-4;

    let plain = mnist(&["--plain", "--epochs", "1"])?;
    plain.check(1, 1)?;
    let members = mnist(&["--members", "2", "--epochs", "1"])?;
    members.check(2, 1)?;
    members.check_agrees(&plain, MAX_LOSS_GAP, MAX_ACCURACY_GAP)?;

    let on_ranks = |flags: &[&str], world_size: usize| {
        let report = mnist_ddp(&[&["--dropout", "0", "--epochs", "1"], flags].concat())?;
        ensure!(report.world_size == world_size, "{} ranks, asked for {world_size}", report.world_size);
        Ok(report)
    };
    let one = on_ranks(&["--ranks", "1"], 1)?;
    one.check(1, 1)?;
    on_ranks(&["--ranks", "3", "--shares", "1,3,2"], 3)?.check_agrees(&one, MAX_LOSS_GAP, MAX_ACCURACY_GAP)?;
    on_ranks(&["--ranks", "2", "--members", "2"], 2)?.check_agrees(&one, MAX_LOSS_GAP, MAX_ACCURACY_GAP)?;

    let steps = |flags: &[&str], world_size| on_ranks(&[&["--train-images", "1280"], flags].concat(), world_size);
    let one = steps(&["--ranks", "1"], 1)?;
    for (ranks, shares) in [("2", "1,1"), ("3", "0,3,1"), ("4", "4,3,2,1")] {
        let report = steps(&["--ranks", ranks, "--shares", shares], ranks.parse()?)?;
        report.check_agrees(&one, MAX_STEP_LOSS_GAP, MAX_ACCURACY_GAP)?;
    }

    shell::run(&mut shell::command("cargo", &["run", "--release", "--example", "own_loop"]))?;

    let promised = mnist(&["--members", "2", "--epochs", "3"])?;
    promised.check(2, 3)?;
    ensure!(
        promised.test_accuracy >= PROMISED_ACCURACY,
        "three epochs reach an accuracy of {}, the README promises {PROMISED_ACCURACY}",
        promised.test_accuracy,
    );
    Ok(())
}

/// The report of a run of the MNIST example.
fn mnist(flags: &[&str]) -> Result<MnistReport> {
    report("mnist", flags)
}

/// The report of a run of the MNIST example on ranks.
fn mnist_ddp(flags: &[&str]) -> Result<MnistReport> {
    report("mnist_ddp", flags)
}

fn report(example: &str, flags: &[&str]) -> Result<MnistReport> {
    // With the time to build it, on a slow machine.
    const LIMIT: Duration = Duration::from_secs(30 * 60);
    let args = [&["run", "--release", "--example", example, "--"], flags].concat();
    let stdout = shell::output_within(LIMIT, &mut shell::command("cargo", &args))?;
    print!("{stdout}");
    MnistReport::from_stdout(&stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_keep_their_order_and_can_be_chosen_or_left_out() {
        let steps = |only: &[Step], skip: &[Step]| steps(&Ci { only: only.to_vec(), skip: skip.to_vec() });
        assert_eq!(steps(&[], &[]), Step::value_variants());
        assert_eq!(steps(&[Step::Docs, Step::Fmt], &[]), [Step::Fmt, Step::Docs]);
        assert!(!steps(&[], &[Step::Tests]).contains(&Step::Tests));
        assert_eq!(steps(&[], &[Step::Tests]).len(), Step::value_variants().len() - 1);
    }

    #[test]
    fn a_step_is_called_by_the_name_that_is_printed() {
        for &step in Step::value_variants() {
            assert_eq!(Step::from_str(step.name(), false), Ok(step));
        }
    }
}
