//! Running one closure as every rank of a group.

use std::{
    num::NonZeroUsize,
    panic::{self, AssertUnwindSafe},
    thread,
    time::Duration,
};

use crate::{CollectiveError, ProcessGroup, ThreadCommunicator, process_group};

/// Runs `body` once per rank, each on a thread of its own, and gives their results by rank.
///
/// # Panics
///
/// With the panic of the rank that broke the group, or of the lowest rank that panicked, after all have ended.
/// If a thread cannot be started.
pub fn run_ranks<R: Send>(
    world_size: NonZeroUsize,
    timeout: Duration,
    body: impl Fn(ThreadCommunicator) -> R + Sync,
) -> Vec<R> {
    let communicators = ThreadCommunicator::group(world_size, timeout);
    let first_cause = communicators[0].watch();
    run_each(communicators, first_cause, body)
}

/// Runs `body` once per rank with a process group of its own, each on a thread of its own, and gives their results by rank.
///
/// The ranks of a group of processes run the same program; only its [`local_rank`](ProcessGroup::local_rank) is the rank.
///
/// # Panics
///
/// As [`run_ranks`].
pub fn run_groups<R: Send>(
    world_size: NonZeroUsize,
    timeout: Duration,
    body: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    let communicators = ThreadCommunicator::group(world_size, timeout);
    let first_cause = communicators[0].watch();
    run_each(process_group::groups(communicators, timeout), first_cause, body)
}

fn run_each<C: Send, R: Send>(
    ranks: Vec<C>,
    first_cause: impl Fn() -> Option<CollectiveError>,
    body: impl Fn(C) -> R + Sync,
) -> Vec<R> {
    let body = &body;
    let outcomes: Vec<thread::Result<R>> = thread::scope(|scope| {
        let run = |rank| move || panic::catch_unwind(AssertUnwindSafe(|| body(rank)));
        let threads: Vec<_> = ranks.into_iter().map(|one| scope.spawn(run(one))).collect();
        threads.into_iter().map(|thread| thread.join().and_then(|outcome| outcome)).collect()
    });
    let culprit = match first_cause() {
        Some(CollectiveError::RankEnded { rank, panicked: true, .. }) => Some(rank),
        _ => None,
    };
    let mut results = Vec::with_capacity(outcomes.len());
    let mut panics = Vec::new();
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(result) => results.push(result),
            Err(payload) => panics.push((Some(rank) != culprit, rank, payload)),
        }
    }
    match panics.into_iter().min_by_key(|&(is_victim, rank, _)| (is_victim, rank)) {
        Some((_, _, payload)) => panic::resume_unwind(payload),
        None => results,
    }
}
