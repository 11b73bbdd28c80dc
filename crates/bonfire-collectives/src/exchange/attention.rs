//! What a rank notices while it waits: that the group broke, that ranks ended or wait in a ring.

use core::ops::ControlFlow;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    ExchangeCommunicator, Other,
    header::{Claim, Header},
    notice::{Link, Notice},
};
use crate::{CollectiveError, Transport, Watch, broken::Break, call::Call};

/// How long a transfer waits before it looks for a ring of ranks that wait for each other.
const PATIENCE: Duration = Duration::from_millis(20);

/// A rank in a call, looking at notices and headers.
pub(super) struct Attention<'r, T: Transport> {
    pub(super) communicator: &'r ExchangeCommunicator<T>,
    pub(super) call: Call,
    /// Calls of this rank with this one.
    pub(super) num_calls: u64,
    pub(super) stage: Stage,
    pub(super) others: &'r mut [Other],
    pub(super) chains: &'r mut Vec<Vec<Link>>,
    pub(super) started: Instant,
    /// Whether the rank that this one waits for knows it.
    pub(super) has_told: bool,
    /// A rank whose header has nothing to do with this call, and what it wants instead if that can be read.
    pub(super) stranger: Option<(usize, Option<Claim>)>,
}

/// What a rank waits for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Stage {
    /// Headers, to compare with its own claim.
    Meet(Claim),
    /// Descriptions of what does not match: the group is as good as broken, and all ranks know it.
    Describe,
    /// Data.
    Work,
}

impl<T: Transport> Attention<'_, T> {
    fn break_off(&mut self, cause: CollectiveError, concerned: Vec<usize>) -> ControlFlow<()> {
        self.communicator.break_off(Break { cause: Arc::new(cause), concerned });
        ControlFlow::Break(())
    }

    /// Breaks the group if a rank wants something that cannot meet this call.
    ///
    /// Not as soon as its header comes: behind it there may be a notice that says that the rank has given up.
    pub(super) fn check_strangers(&mut self) -> ControlFlow<()> {
        let (Stage::Meet(claim), Some((from, theirs))) = (self.stage, self.stranger) else {
            return ControlFlow::Continue(());
        };
        let Call { rank, world_size, collective } = self.call;
        let Some(theirs) = theirs else {
            let reason = "it sent a header of another version".into();
            let cause = CollectiveError::ConnectionFailed { rank, world_size, other: from, reason };
            return self.break_off(cause, Vec::new());
        };
        // A transfer meets something else: nobody but these two can know.
        let (low, high) = if rank < from { (claim, theirs) } else { (theirs, claim) };
        let (reference, differing) = (rank.min(from), rank.max(from));
        let (given, expected) = (high.to_string(), low.to_string());
        let cause = CollectiveError::Mismatch { rank, world_size, collective, differing, reference, given, expected };
        self.break_off(cause, vec![reference, differing])
    }

    /// The other rank of the transfer that this rank has waited for long enough to ask why.
    fn partner(&self) -> Option<(usize, Claim)> {
        let Stage::Meet(claim) = self.stage else { return None };
        let partner = claim.other.filter(|_| claim.collective.is_point_to_point())?;
        (self.started.elapsed() >= PATIENCE).then_some((partner as usize, claim))
    }

    /// Passes a chain of waiting ranks on to the rank that this one waits for, or finds that it is a ring.
    fn pass_on(&mut self, mut chain: Vec<Link>, (partner, claim): (usize, Claim)) -> ControlFlow<()> {
        chain.push(Link { rank: self.call.rank as u32, claim, num_calls: self.num_calls });
        let Some(start) = chain.iter().position(|link| link.rank as usize == partner) else {
            self.communicator.transport.notify(partner, &Notice::Waiting(chain).encode());
            return ControlFlow::Continue(());
        };
        let (ring, Call { rank, world_size, collective }) = (&chain[start..], self.call);
        if claim.completes(rank, ring[0].claim) {
            // Two halves of one transfer, whose headers are on their way.
            return ControlFlow::Continue(());
        }
        let cause = CollectiveError::Mismatch {
            rank,
            world_size,
            collective,
            differing: rank,
            reference: partner,
            given: claim.to_string(),
            expected: ring[0].claim.to_string(),
        };
        let concerned = ring.iter().map(|link| link.rank as usize).collect();
        self.break_off(cause, concerned)
    }
}

impl<T: Transport> Watch for Attention<'_, T> {
    fn notice(&mut self, from: usize, notice: &[u8]) -> ControlFlow<()> {
        match Notice::decode(notice) {
            // All ranks are about to know that calls do not match.
            Some(Notice::Broken(_)) if matches!(self.stage, Stage::Describe) => ControlFlow::Continue(()),
            Some(Notice::Broken(broken)) => {
                if self.communicator.state.set(&broken) {
                    tracing::error!(error = %broken.cause, rank = self.call.rank, from, "process group broken");
                }
                ControlFlow::Break(())
            }
            Some(Notice::Ended { num_calls, panicked }) => {
                self.others[from] = Other { num_calls, ended: Some(panicked) };
                if !panicked {
                    return ControlFlow::Continue(());
                }
                let world_size = self.call.world_size;
                self.break_off(CollectiveError::RankEnded { rank: from, world_size, num_calls, panicked }, Vec::new())
            }
            Some(Notice::Waiting(chain)) => {
                // Who has met this rank since does not wait any more; all others of the chain wait as long as it does.
                let is_over = |last: &Link| last.num_calls <= self.others[from].num_calls;
                if chain.last().is_none_or(is_over) {
                    return ControlFlow::Continue(());
                }
                let flow = match self.partner() {
                    Some(partner) => self.pass_on(chain.clone(), partner),
                    None => ControlFlow::Continue(()),
                };
                self.chains.push(chain);
                flow
            }
            None => {
                let (rank, world_size) = (self.call.rank, self.call.world_size);
                let reason = "it sent a notice of another version".into();
                self.break_off(CollectiveError::ConnectionFailed { rank, world_size, other: from, reason }, Vec::new())
            }
        }
    }

    fn arrived(&mut self, from: usize, message: &[u8]) {
        let Stage::Meet(claim) = self.stage else { return };
        let header = Header::decode(message);
        if let Some(header) = &header {
            self.others[from].num_calls = header.num_calls;
        }
        if header.is_none_or(|header| claim.cannot_meet(self.call.rank, header.claim)) {
            self.stranger.get_or_insert((from, header.map(|header| header.claim)));
        }
    }

    fn tick(&mut self) -> ControlFlow<()> {
        if self.communicator.state.is_broken() && !matches!(self.stage, Stage::Describe) {
            return ControlFlow::Break(());
        }
        self.check_strangers()?;
        let Some(partner) = self.partner().filter(|_| !self.has_told) else { return ControlFlow::Continue(()) };
        self.has_told = true;
        let known = self.chains.clone();
        [Vec::new()].into_iter().chain(known).try_for_each(|chain| self.pass_on(chain, partner))
    }
}
