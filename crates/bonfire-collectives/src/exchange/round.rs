//! One call of one rank: what it exchanges with the others, and what it makes of failures.

use std::{
    sync::{Arc, MutexGuard},
    time::{Duration, Instant},
};

use super::{
    ExchangeCommunicator, Other, Progress,
    attention::{Attention, Stage},
    header::{self, Description, Header, Terms},
};
use crate::{
    BufferMut, CollectiveError, DType, Incoming, Outgoing, ReduceOp, Transport, TransportError, broken::Break,
    call::Call,
};

/// Data of at most this many bytes goes with the header, so that a small collective is one round trip.
///
/// Measured with two ranks on two cores, over TCP: see benches/RESULTS.md.
pub(super) const INLINE_BYTES: usize = 16 * 1024;
/// The longest time to find out where calls differ, once it is known that they do.
const DESCRIBING: Duration = Duration::from_secs(2);
/// What no clock can add up.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// A call in progress.
pub(super) struct Round<'c, T: Transport> {
    communicator: &'c ExchangeCommunicator<T>,
    call: Call,
    progress: MutexGuard<'c, Progress>,
    started: Instant,
    deadline: Instant,
}

/// Where first messages go, kept from call to call.
pub(super) struct Memory {
    /// By rank; the own one is what was sent last.
    first: Vec<Vec<u8>>,
    lengths: Vec<usize>,
}

impl Memory {
    pub(super) fn new(world_size: usize) -> Self {
        Self { first: vec![Vec::new(); world_size], lengths: vec![0; world_size] }
    }

    /// The data that came with a rank's header.
    fn inline(&self, rank: usize) -> &[u8] {
        &self.first[rank][Header::NUM_BYTES..self.lengths[rank].max(Header::NUM_BYTES)]
    }
}

impl<'c, T: Transport> Round<'c, T> {
    pub(super) fn new(
        communicator: &'c ExchangeCommunicator<T>,
        call: Call,
        progress: MutexGuard<'c, Progress>,
    ) -> Self {
        let started = Instant::now();
        let deadline = started + communicator.timeout.min(NEVER);
        Self { communicator, call, progress, started, deadline }
    }

    pub(super) const fn rank(&self) -> usize {
        self.call.rank
    }

    pub(super) const fn world_size(&self) -> usize {
        self.call.world_size
    }

    /// All ranks but this one.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + Clone + use<T> {
        let Call { rank, world_size, .. } = self.call;
        (0..world_size).filter(move |&other| other != rank)
    }

    /// The data that came with a rank's header; of this rank, what went with its own.
    pub(super) fn inline(&self, rank: usize) -> &[u8] {
        self.progress.memory.inline(rank)
    }

    /// Data of `num_bytes` that came with a rank's header.
    pub(super) fn inline_of(&self, rank: usize, num_bytes: usize) -> Result<&[u8], CollectiveError> {
        let data = self.inline(rank);
        if data.len() == num_bytes {
            return Ok(data);
        }
        let reason = format!("it sent {} bytes with its header where {num_bytes} were expected", data.len());
        Err(self.fail(TransportError::Failed { rank, reason }, &[]))
    }

    /// Exchanges headers with all ranks, or the other one of a transfer, and compares them.
    ///
    /// `put_inline` puts the data for a rank behind its header, at most [`INLINE_BYTES`].
    pub(super) fn meet(
        &mut self,
        terms: &Terms<'_>,
        put_inline: impl Fn(usize, &mut Vec<u8>),
    ) -> Result<(), CollectiveError> {
        let header = Header::new(terms, self.progress.num_calls);
        let partner = terms.other.filter(|_| terms.collective.is_point_to_point());
        let them: Vec<usize> = match partner {
            Some(partner) => vec![partner],
            None => self.others().collect(),
        };
        let message = |to| {
            let mut message = Vec::from(header.encode());
            put_inline(to, &mut message);
            message
        };
        let messages: Vec<Vec<u8>> = them.iter().map(|&to| message(to)).collect();
        let mut first = std::mem::take(&mut self.progress.memory.first);
        first[self.rank()] = message(self.rank());
        let mut outgoing: Vec<_> = them.iter().zip(&messages).map(|(&to, bytes)| Outgoing::new(to, bytes)).collect();
        let result = {
            let room = first.iter_mut().enumerate().filter(|(from, _)| them.contains(from));
            let mut incoming: Vec<_> = room
                .map(|(from, bytes)| {
                    bytes.resize(Header::NUM_BYTES + INLINE_BYTES, 0);
                    Incoming::new(from, bytes)
                })
                .collect();
            let result = self.exchange_in(Stage::Meet(header.claim), &mut outgoing, &mut incoming);
            for incoming in incoming {
                self.progress.memory.lengths[incoming.from] = incoming.num_received;
            }
            result
        };
        let rank = self.rank();
        self.progress.memory.lengths[rank] = first[rank].len();
        self.progress.memory.first = first;
        result?;
        match partner {
            Some(partner) => self.compare_with(partner, &header),
            None => self.compare_all(terms, &header),
        }
    }

    /// Exchanges data, in list order for each rank.
    pub(super) fn exchange(
        &mut self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
    ) -> Result<(), CollectiveError> {
        self.exchange_in(Stage::Work, outgoing, incoming)?;
        // A message of another length than its room: ranks disagree in spite of equal headers.
        match incoming.iter().find(|incoming| incoming.num_received != incoming.bytes.len()) {
            None => Ok(()),
            Some(&Incoming { from, num_received, .. }) => {
                let reason = format!("it sent {num_received} bytes where more were expected");
                Err(self.fail(TransportError::Failed { rank: from, reason }, &[]))
            }
        }
    }

    fn exchange_in(
        &mut self,
        stage: Stage,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
    ) -> Result<(), CollectiveError> {
        let deadline = match stage {
            Stage::Describe => Instant::now() + DESCRIBING,
            Stage::Meet(_) | Stage::Work => self.deadline,
        };
        let communicator = self.communicator;
        let mut attention = self.attention(stage);
        let mut result = communicator.transport.exchange(outgoing, incoming, deadline, &mut attention);
        if result.is_ok() && attention.check_strangers().is_break() {
            result = Err(TransportError::Stopped);
        }
        result.map_err(|error| {
            let mut missing: Vec<usize> = incoming.iter().filter(|one| !one.is_received).map(|one| one.from).collect();
            if missing.is_empty() {
                missing.extend(outgoing.iter().filter(|one| !one.is_sent).map(|one| one.to));
            }
            missing.sort_unstable();
            missing.dedup();
            match stage {
                // The caller knows a better error.
                Stage::Describe => self.call_broken(),
                Stage::Meet(_) | Stage::Work => self.fail(error, &missing),
            }
        })
    }

    fn attention(&mut self, stage: Stage) -> Attention<'_, T> {
        let progress = &mut *self.progress;
        Attention {
            communicator: self.communicator,
            call: self.call,
            num_calls: progress.num_calls,
            stage,
            others: &mut progress.others,
            chains: &mut progress.chains,
            started: self.started,
            has_told: false,
            stranger: None,
        }
    }

    /// Whether the transport reduces this itself.
    pub(super) fn is_native(&self, dtype: DType, op: ReduceOp) -> bool {
        self.communicator.transport.reduces(dtype, op)
    }

    /// Has the transport reduce a buffer.
    pub(super) fn all_reduce(&mut self, buffer: &mut BufferMut<'_>, op: ReduceOp) -> Result<(), CollectiveError> {
        let (communicator, deadline) = (self.communicator, self.deadline);
        let result = communicator.transport.all_reduce(buffer, op, deadline, &mut self.attention(Stage::Work));
        let others: Vec<usize> = self.others().collect();
        result.map_err(|error| self.fail(error, &others))
    }

    fn call_broken(&self) -> CollectiveError {
        let Call { rank, world_size, .. } = self.call;
        CollectiveError::Aborted { rank, world_size, reason: "calls do not match".into() }
    }

    /// Breaks the group because of what the transport says, or finds it broken.
    fn fail(&self, error: TransportError, missing: &[usize]) -> CollectiveError {
        let Call { rank, world_size, collective } = self.call;
        let mut concerned = Vec::new();
        let cause = match error {
            // Somebody has set the cause before the watch asked to stop.
            TransportError::Stopped => self.call_broken(),
            TransportError::Late => {
                let is_there = |other: &usize| !missing.contains(other);
                concerned = if collective.is_point_to_point() {
                    vec![rank]
                } else {
                    (0..world_size).filter(is_there).collect()
                };
                let waited = self.started.elapsed();
                CollectiveError::Timeout { rank, world_size, collective, waited, missing: missing.to_vec() }
            }
            TransportError::Ended { rank: ended } => {
                let Other { num_calls, ended: panicked } = self.progress.others[ended];
                let panicked = panicked.unwrap_or(false);
                CollectiveError::RankEnded { rank: ended, world_size, num_calls, panicked }
            }
            TransportError::Failed { rank: other, reason } => {
                CollectiveError::ConnectionFailed { rank, world_size, other, reason }
            }
            TransportError::TooLong { rank: other, .. } => {
                CollectiveError::ConnectionFailed { rank, world_size, other, reason: error.to_string() }
            }
        };
        let broken = self.communicator.break_off(Break { cause: Arc::new(cause), concerned });
        broken.explain(self.call, self.started.elapsed())
    }

    /// Compares the two halves of a transfer.
    fn compare_with(&mut self, partner: usize, own: &Header) -> Result<(), CollectiveError> {
        // Nobody of those who wait for it, or for those, waits any more.
        self.progress.chains.retain(|chain| chain.iter().all(|link| link.rank as usize != partner));
        let theirs = self.header(partner)?;
        if own.has_shapes_of(&theirs) {
            return Ok(());
        }
        let rank = self.rank();
        let (low, high) = if rank < partner { (own, &theirs) } else { (&theirs, own) };
        let texts = (high.describe_buffer(), low.describe_buffer());
        let (reference, differing) = (rank.min(partner), rank.max(partner));
        Err(self.mismatch((differing, reference), texts, vec![reference, differing]))
    }

    /// Compares the headers of all ranks, and finds out where they differ.
    fn compare_all(&mut self, terms: &Terms<'_>, own: &Header) -> Result<(), CollectiveError> {
        self.progress.chains.clear();
        let headers: Vec<Header> = (0..self.world_size())
            .map(|rank| if rank == self.rank() { Ok(*own) } else { self.header(rank) })
            .collect::<Result<_, _>>()?;
        let Some((differing, reference)) = header::odd_one_out(&headers) else { return Ok(()) };
        let descriptions = self.describe(terms);
        let of = |rank: usize| (&headers[rank], &descriptions[rank]);
        let texts = header::difference(of(differing), of(reference));
        Err(self.mismatch((differing, reference), texts, (0..self.world_size()).collect()))
    }

    /// What all ranks say of their buffers, as far as it comes.
    fn describe(&mut self, terms: &Terms<'_>) -> Vec<Description> {
        let own = Description::encode(terms);
        let mut messages = vec![vec![0; Description::MAX_BYTES]; self.world_size()];
        messages[self.rank()].clone_from(&own);
        let them: Vec<usize> = self.others().collect();
        let mut outgoing: Vec<_> = them.iter().map(|&to| Outgoing::new(to, &own)).collect();
        let mut lengths = vec![0; self.world_size()];
        lengths[self.rank()] = own.len();
        {
            let room = messages.iter_mut().enumerate().filter(|(from, _)| them.contains(from));
            let mut incoming: Vec<_> = room.map(|(from, bytes)| Incoming::new(from, bytes)).collect();
            // Whoever does not say more is described by its header alone.
            let _ = self.exchange_in(Stage::Describe, &mut outgoing, &mut incoming);
            for incoming in incoming.iter().filter(|incoming| incoming.is_received) {
                lengths[incoming.from] = incoming.num_received;
            }
        }
        let decode = |(message, length): (&Vec<u8>, usize)| Description::decode(&message[..length]).unwrap_or_default();
        messages.iter().zip(lengths).map(decode).collect()
    }

    fn header(&self, rank: usize) -> Result<Header, CollectiveError> {
        let message = &self.progress.memory.first[rank][..self.progress.memory.lengths[rank]];
        // Checked when it arrived.
        Header::decode(message)
            .ok_or_else(|| self.fail(TransportError::Failed { rank, reason: "it sent no header".into() }, &[]))
    }

    fn mismatch(
        &self,
        (differing, reference): (usize, usize),
        (given, expected): (String, String),
        concerned: Vec<usize>,
    ) -> CollectiveError {
        let Call { rank, world_size, collective } = self.call;
        let cause = CollectiveError::Mismatch { rank, world_size, collective, differing, reference, given, expected };
        let broken = self.communicator.break_off(Break { cause: Arc::new(cause), concerned });
        broken.explain(self.call, self.started.elapsed())
    }
}
