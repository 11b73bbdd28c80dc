//! The work of a committed round, and the guards that keep its members together.

use super::{
    deposit::Deposit,
    group::{Group, Progress},
};

/// One rank's share of a part of a collective. It must neither wait nor run code of a caller.
pub(super) type Step = fn(&Round<'_>, usize);

/// A committed round: its members' deposits stay where they are until all have left.
pub(super) struct Round<'g> {
    group: &'g Group,
    members: Members,
}

/// Who takes part in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Members {
    All,
    Pair(usize, usize),
}

impl Members {
    pub(super) fn iter(self, world_size: usize) -> impl Iterator<Item = usize> {
        (0..world_size).filter(move |&rank| self.contains(rank))
    }

    const fn contains(self, rank: usize) -> bool {
        match self {
            Self::All => true,
            Self::Pair(a, b) => rank == a || rank == b,
        }
    }
}

impl<'g> Round<'g> {
    /// # Safety
    ///
    /// The caller is a member of a committed round of these members, and drops this before it leaves.
    pub(super) const unsafe fn new(group: &'g Group, members: Members) -> Self {
        Self { group, members }
    }

    pub(super) fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// What a member brought.
    pub(super) fn deposit(&self, rank: usize) -> &Deposit<'_> {
        assert!(self.members.contains(rank), "only members of a round look at each other");
        // SAFETY: `rank` is a member, and the caller of `new` has not left the round while `self` lives.
        unsafe { self.group.peek(rank) }
    }

    /// Does every member's share, the others waiting.
    pub(super) fn work_alone(&self, leader: usize, steps: &[Step]) {
        for step in steps {
            match self.members {
                Members::All => (0..self.world_size()).for_each(|rank| step(self, rank)),
                Members::Pair(..) => step(self, leader),
            }
        }
    }
}

/// Does one rank's share of each step, and waits for the others after each.
pub(super) fn work_together(round: &Round<'_>, rank: usize, progress: &mut Progress, steps: &[Step]) {
    let mut stages = Stages { group: round.group, rank, progress, num_left: steps.len() };
    for step in steps {
        step(round, rank);
        stages.pass();
    }
}

/// Keeps a rank in its round until it has come to every stage, whatever happens to its share.
struct Stages<'g, 'p> {
    group: &'g Group,
    rank: usize,
    progress: &'p mut Progress,
    num_left: usize,
}

impl Stages<'_, '_> {
    fn pass(&mut self) {
        self.group.pass_stage(self.progress);
        self.num_left -= 1;
    }
}

impl Drop for Stages<'_, '_> {
    fn drop(&mut self) {
        if self.num_left > 0 {
            self.group.spoil(self.rank, self.progress.num_calls);
        }
        while self.num_left > 0 {
            self.pass();
        }
    }
}

/// Settles the members of a round, once, whatever happens to the leader's work.
pub(super) struct Settle<'g> {
    group: &'g Group,
    members: Members,
    leader: usize,
    num_calls: u64,
    is_spoiled: bool,
}

impl<'g> Settle<'g> {
    pub(super) const fn new(round: &Round<'g>, leader: usize, num_calls: u64) -> Self {
        Self { group: round.group, members: round.members, leader, num_calls, is_spoiled: true }
    }

    /// Settles them for good work.
    pub(super) fn finish(mut self) {
        self.is_spoiled = false;
    }
}

impl Drop for Settle<'_> {
    fn drop(&mut self) {
        if self.is_spoiled {
            self.group.spoil(self.leader, self.num_calls);
        }
        self.group.settle(self.members);
    }
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroUsize, panic, sync::Arc, thread, time::Duration};

    use super::*;
    use crate::{BufferMut, Collective, CollectiveError, call::Call};

    /// The bug that must not become a hang or a dangling buffer: a step that panics on rank 1's share.
    fn step_with_a_bug(_: &Round<'_>, rank: usize) {
        if rank == 1 {
            panic::resume_unwind(Box::new("a bug in a step"));
        }
    }

    /// How each of three ranks leaves a round of two steps, the first of which panics.
    fn leave_a_spoiled_round(num_elements: usize) -> Vec<Result<CollectiveError, &'static str>> {
        let world_size = 3;
        let group = Arc::new(Group::new(NonZeroUsize::new(world_size).unwrap(), Duration::from_secs(9)));
        let rank = |rank| {
            let group = group.clone();
            move || {
                let mut values = vec![0f32; num_elements];
                let outputs = &[BufferMut::from_slice(&mut values)];
                let deposit = Deposit { outputs, ..Deposit::of(Collective::AllReduce) };
                let call = Call { rank, world_size, collective: Collective::AllReduce };
                group.run(call, &mut Progress::default(), &deposit, &[step_with_a_bug, step_with_a_bug]).unwrap_err()
            }
        };
        let threads: Vec<_> = (0..world_size).map(rank).map(thread::spawn).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|payload| *payload.downcast::<&'static str>().unwrap()))
            .collect()
    }

    #[test]
    fn a_share_that_panics_spoils_the_round_on_every_rank_and_nobody_hangs() {
        for num_elements in [1, 1_000_000] {
            let ways = leave_a_spoiled_round(num_elements);
            let num_panics = ways.iter().filter(|way| **way == Err("a bug in a step")).count();
            assert_eq!(num_panics, 1, "{num_elements}: {ways:?}");
            for error in ways.into_iter().flatten() {
                let CollectiveError::Broken { cause, .. } = error else { panic!("must be broken: {error}") };
                assert!(matches!(&*cause, CollectiveError::RankEnded { panicked: true, .. }), "{cause}");
            }
        }
    }
}
