//! What any [`Communicator`] must do, as checks that run on every rank.
//!
//! A check is one program for all ranks, so it works for threads and for processes alike: a rank knows from
//! a seed what every other rank gives, computes the result alone ([`oracle`]) and compares. It panics when
//! the communicator is wrong.

use std::{num::NonZeroUsize, time::Duration};

use crate::{CollectiveError, Communicator};

mod breaking;
pub mod oracle;
mod results;

pub use breaking::BREAKING;
pub use results::{RESULTS, all_gather_case, all_reduce_case, broadcast_case, reduce_scatter_case, transfer_case};

/// One check: a name that says what holds, and the program of each rank.
pub struct Check {
    name: &'static str,
    /// The smallest group it makes sense in.
    min_world_size: usize,
    program: Program,
    /// The timeout the group must have.
    timeout: Duration,
}

/// What the ranks of a fresh group do.
enum Program {
    Each(fn(&dyn Communicator)),
    /// The last rank's call differs from the others'; in another group, that of rank 0.
    OddOneOut(Call),
}

/// A call on each rank, the odd one out being told.
type Call = fn(&dyn Communicator, bool) -> Result<(), CollectiveError>;

/// Runs a program on every rank of a fresh group, and comes back when all have ended; panics if one did.
pub type Start<'a> = &'a dyn Fn(NonZeroUsize, Duration, &(dyn Fn(&dyn Communicator) + Sync));

/// Runs all `checks` that make sense for `world_size`.
///
/// # Panics
///
/// If the communicator fails one.
pub fn run(checks: &[Check], world_size: NonZeroUsize, start: Start<'_>) {
    for check in checks.iter().filter(|check| check.min_world_size <= world_size.get()) {
        let run = |program: &(dyn Fn(&dyn Communicator) + Sync)| {
            start(world_size, check.timeout, &|communicator| {
                assert_eq!(communicator.world_size(), world_size.get(), "{}", check.name);
                assert_eq!(communicator.timeout(), check.timeout, "{}", check.name);
                program(communicator);
            });
        };
        match check.program {
            Program::Each(program) => run(&program),
            Program::OddOneOut(call) => {
                let last = world_size.get() - 1;
                run(&|communicator| breaking::odd_one_out(communicator, check.name, last, call));
                // Of two ranks that differ, neither is odder: the lower one is the reference.
                if world_size.get() > 2 {
                    run(&|communicator| breaking::odd_one_out(communicator, check.name, 0, call));
                }
            }
        }
    }
}

/// A check's result must be there.
fn must(result: Result<(), CollectiveError>) {
    if let Err(error) = result {
        panic!("{error}");
    }
}
