//! `cargo xtask mpi`: the conformance suite and an example over MPI, in processes that mpirun starts.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use serde::Deserialize;

use crate::mnist_report::MnistReport;
use crate::shell;

/// A suite takes seconds; one that hangs is ended.
const LIMIT: Duration = Duration::from_secs(300);

/// How many processes.
#[derive(Debug, Args)]
pub(crate) struct Mpi {
    /// Numbers of ranks, one run for each
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 3, 4])]
    ranks: Vec<usize>,
}

impl Mpi {
    /// What `cargo xtask ci` runs.
    pub(crate) fn all() -> Self {
        Self { ranks: vec![1, 2, 3, 4] }
    }
}

/// Checks the code that only this feature has, runs the suite, and trains on processes and on threads alike.
pub(crate) fn run(args: &Mpi) -> Result<()> {
    let package = ["--release", "-p", "bonfire-collectives", "--features", "mpi,serde"];
    let clippy = [&["clippy"][..], &package, &["--all-targets", "--", "-D", "warnings"]].concat();
    shell::run(&mut shell::command("cargo", &clippy))?;
    let build = [&["test"][..], &package, &["--test", "mpi", "--no-run"]].concat();
    let suite = built("mpi", &build)?;
    for &ranks in &args.ranks {
        print!("{}", mpirun(ranks, &suite, &[])?);
    }
    let build = ["build", "--release", "--features", "mpi", "--example", "mnist_ddp"];
    let example = built("mnist_ddp", &build)?;
    for &ranks in &args.ranks {
        // Twenty steps.
        let flags = ["--dropout", "0", "--epochs", "1", "--train-images", "1280"];
        let stdout = mpirun(ranks, &example, &flags)?;
        print!("{stdout}");
        let on_processes = MnistReport::from_stdout(&stdout)?;
        ensure!(on_processes.world_size == ranks, "{} ranks, asked for {ranks}", on_processes.world_size);
        let threads = ["--ranks", &ranks.to_string()];
        let stdout = shell::output_within(LIMIT, &mut shell::command(&example, &[&flags[..], &threads].concat()))?;
        // Sums are formed in one order, so the losses are equal to the bit.
        on_processes.check_agrees(&MnistReport::from_stdout(&stdout)?, 0.0, 0.0)?;
    }
    Ok(())
}

/// What a program that mpirun has started so many times wrote on stdout.
fn mpirun(ranks: usize, program: &str, args: &[&str]) -> Result<String> {
    let ranks = ranks.to_string();
    let mut mpirun = shell::command("mpirun", &[&["-n", &ranks, "--oversubscribe", program], args].concat());
    // Open MPI refuses to run as root, as containers do, unless told twice.
    mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    shell::output_within(LIMIT, &mut mpirun).context("Open MPI must be installed")
}

/// Builds the program of a target, and gives its path.
fn built(target: &str, arguments: &[&str]) -> Result<String> {
    let arguments = [arguments, &["--message-format", "json"]].concat();
    let path = executable(target, &shell::output(&mut shell::command("cargo", &arguments))?)?;
    path.into_os_string().into_string().map_err(|path| anyhow!("the path {} is no text", path.display()))
}

/// The program of a target that cargo's messages name.
fn executable(name: &str, messages: &str) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Message {
        target: Option<Target>,
        executable: Option<PathBuf>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }
    let is_it = |message: &Message| message.target.as_ref().is_some_and(|target| target.name == name);
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok())
        .filter(is_it)
        .find_map(|message| message.executable)
        .with_context(|| format!("cargo built no program named {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_suite_is_found_among_the_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"mpi"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"mpi"},"executable":"/target/mpi-1"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executable("mpi", messages).unwrap(), PathBuf::from("/target/mpi-1"));
        assert!(executable("mpi", "").is_err());
    }
}
