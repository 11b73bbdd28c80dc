//! `cargo xtask mpi`: the conformance suite over MPI, in processes that mpirun starts.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use serde::Deserialize;

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

/// Checks the code that only this feature has, builds the suite once, and runs it.
pub(crate) fn run(args: &Mpi) -> Result<()> {
    let package = ["--release", "-p", "bonfire-collectives", "--features", "mpi,serde"];
    let clippy = [&["clippy"][..], &package, &["--all-targets", "--", "-D", "warnings"]].concat();
    shell::run(&mut shell::command("cargo", &clippy))?;
    let build = [&["test"][..], &package, &["--test", "mpi", "--no-run", "--message-format", "json"]].concat();
    let suite = executable(&shell::output(&mut shell::command("cargo", &build))?)?;
    let suite = suite.to_str().context("the path of the suite is text")?;
    for ranks in &args.ranks {
        let ranks = ranks.to_string();
        let mut mpirun = shell::command("mpirun", &["-n", &ranks, "--oversubscribe", suite]);
        // Open MPI refuses to run as root, as containers do, unless told twice.
        mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        let stdout = shell::output_within(LIMIT, &mut mpirun).context("Open MPI must be installed")?;
        print!("{stdout}");
    }
    Ok(())
}

/// The test program that cargo's messages name.
fn executable(messages: &str) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Message {
        target: Option<Target>,
        executable: Option<PathBuf>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }
    let is_suite = |message: &Message| message.target.as_ref().is_some_and(|target| target.name == "mpi");
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok())
        .filter(is_suite)
        .find_map(|message| message.executable)
        .context("cargo built no test named mpi")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_suite_is_found_among_the_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"mpi"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"mpi"},"executable":"/target/mpi-1"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executable(messages).unwrap(), PathBuf::from("/target/mpi-1"));
        assert!(executable("").is_err());
    }
}
