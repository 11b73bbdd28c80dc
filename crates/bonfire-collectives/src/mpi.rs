//! A transport over MPI, for ranks that mpirun has started.
//!
//! MPI reads and writes the callers' buffers while a message is under way, and cannot be made to stop. So small messages
//! and notices are copied, large ones are received only once they are announced, and a call that fails in the middle of
//! large data waits a moment for it; if it does not come, the process says so and ends.

mod raw;
mod world;

use std::{
    hint, process,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use raw::{Comm, Request};
pub use world::MpiWorld;

use crate::{
    BufferMut, DType, ExchangeCommunicator, Incoming, MAX_NOTICE_BYTES, Outgoing, ProcessGroupError, ReduceOp,
    Transport, TransportError, Watch, fingerprint::fingerprint, reduce,
};

/// One rank of a group whose ranks talk over MPI.
pub type MpiCommunicator = ExchangeCommunicator<MpiTransport>;

/// Messages of at most this many bytes are copied, so that they need nobody's buffer.
const COPIED_BYTES: usize = 64 * 1024;
/// MPI sums at most this much in one go: it counts elements in 32 bits, and its result goes to another buffer.
const SUM_BYTES: usize = 1 << 30;
/// How long a waiting rank keeps its core busy, then how long it lets others run, then how long it naps lightly.
const SPIN: Duration = Duration::from_micros(50);
const YIELD: Duration = Duration::from_millis(1);
const LIGHT: Duration = Duration::from_millis(100);
const NAP: Duration = Duration::from_micros(50);
const LONG_NAP: Duration = Duration::from_micros(500);
/// How often a rank that waits looks up.
const TICK: Duration = Duration::from_millis(5);
/// How long messages that are under way may still take when a call has failed or the transport is dropped.
const CLOSING: Duration = Duration::from_secs(1);
/// MPI promises tags up to 32767; each group takes two for its start.
const NUM_TAGS: u64 = 16_000;

/// Looks in vain after which nothing has come: the first may only have MPI take in what has.
const LOOKS: usize = 2;

/// What a notice of the transport is, by its first byte.
const NOTICE: u8 = 0;
const CLOSE: u8 = 1;

/// One rank's end of a group over MPI.
///
/// A process that dies takes the run with it, since mpirun ends all others; so does a call that fails, by its timeout or
/// otherwise, while large buffers are under way: it prints why and ends the process with status 1.
pub struct MpiTransport {
    world: MpiWorld,
    messages: Comm,
    notices: Comm,
    native_sum: bool,
    /// For the thread that exchanges.
    ends: Mutex<Vec<End>>,
    /// Copies that are under way.
    copies: Mutex<Vec<(Request, Vec<u8>)>>,
    spin: Duration,
}

/// How far another rank is.
#[derive(Clone, Copy, Default)]
struct End {
    num_sent: u64,
    num_received: u64,
    /// How many messages it had sent to this rank when it ended.
    closed_after: Option<u64>,
}

impl MpiTransport {
    /// This rank's end of a new group of all processes of `world`; waits until all ask for it, with the same name.
    ///
    /// # Errors
    ///
    /// [`ProcessGroupError::Unavailable`] with what MPI says.
    pub fn new(world: &MpiWorld, name: &str) -> Result<Self, ProcessGroupError> {
        let tag = usize::try_from(fingerprint(name.as_bytes()) % NUM_TAGS).expect("it is small");
        let unavailable = |reason| ProcessGroupError::Unavailable { rank: world.rank(), backend: "mpi", reason };
        let lock = world.lock();
        let messages = Comm::world().separate(2 * tag).map_err(unavailable)?;
        let notices = Comm::world().separate(2 * tag + 1).map_err(unavailable)?;
        drop(lock);
        let num_cores = thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            messages,
            notices,
            native_sum: false,
            ends: Mutex::new(vec![End::default(); world.world_size()]),
            copies: Mutex::default(),
            spin: if world.world_size() <= num_cores { SPIN } else { Duration::ZERO },
            world: world.clone(),
        })
    }

    /// Has large sums and means of f32 and f64 formed by `MPI_SUM`, in whatever order MPI likes.
    ///
    /// Results are then not those of other communicators bit for bit, and may differ between runs. All ranks must agree.
    #[must_use]
    pub fn with_native_sum(mut self, native_sum: bool) -> Self {
        self.native_sum = native_sum;
        self
    }

    /// Sends a copy, and forgets those that have arrived.
    fn send_copy(&self, comm: Comm, bytes: Vec<u8>, to: usize) -> Result<(), String> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let _lock = self.world.lock();
        copies.retain_mut(|(request, _)| !request.is_complete().unwrap_or(false));
        // SAFETY: the bytes lie on the heap and are kept, or leaked, until the request is complete; nobody writes them.
        let request = unsafe { comm.send(&raw const bytes[..], to) }?;
        copies.push((request, bytes));
        Ok(())
    }

    fn post(&self, to: usize, kind: u8, notice: &[u8]) {
        let mut bytes = Vec::with_capacity(1 + notice.len());
        bytes.push(kind);
        bytes.extend(notice);
        if let Err(reason) = self.send_copy(self.notices, bytes, to) {
            tracing::warn!(to, reason, "a notice was not sent");
        }
    }

    /// Has MPI form the sums of all ranks' values.
    fn sum(
        &self,
        values: &mut [u8],
        dtype: DType,
        deadline: Instant,
        watch: &mut dyn Watch,
    ) -> Result<(), TransportError> {
        let failed = |reason| self.failed(self.rank(), reason);
        let given = values.to_vec();
        let mut flight = Flight { world: &self.world, sends: Vec::new(), receives: Vec::new() };
        let request = {
            let _lock = self.world.lock();
            // SAFETY: both outlive the flight, which outlives its requests, and are not touched before; they have one
            // length, that of whole elements.
            unsafe { self.messages.sum(&raw const *given, &raw mut *values, dtype) }
        };
        flight.receives.push((0, request.map_err(failed)?));
        let (started, mut last_tick) = (Instant::now(), Instant::now());
        while !flight.is_empty() {
            flight.land().map_err(failed)?;
            let now = Instant::now();
            if now.duration_since(last_tick) >= TICK {
                last_tick = now;
                self.take_notices(&mut self.ends(), watch)?;
                if watch.tick().is_break() {
                    return Err(TransportError::Stopped);
                }
            }
            if now >= deadline {
                return Err(TransportError::Late);
            }
            // MPI adds up in its own calls, so a longer nap would be time lost.
            self.idle(now.duration_since(started).min(YIELD / 2));
        }
        Ok(())
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.world.rank();
        (0..self.world.world_size()).filter(move |&other| other != rank)
    }

    /// Takes in all notices that have arrived.
    fn take_notices(&self, ends: &mut [End], watch: &mut dyn Watch) -> Result<(), TransportError> {
        let mut num_empty = 0;
        loop {
            let found = {
                let _lock = self.world.lock();
                self.notices.probe(None).map_err(|reason| self.failed(self.world.rank(), reason))?
            };
            let Some(found) = found else {
                num_empty += 1;
                if num_empty == LOOKS {
                    return Ok(());
                }
                continue;
            };
            let notice = self.take_notice(found).map_err(|reason| self.failed(found.from, reason))?;
            match notice.split_first() {
                Some((&NOTICE, notice)) => {
                    if watch.notice(found.from, notice).is_break() {
                        return Err(TransportError::Stopped);
                    }
                }
                Some((&CLOSE, count)) => {
                    let count = count.try_into().map_or(0, u64::from_le_bytes);
                    ends[found.from].closed_after = Some(count);
                }
                _ => return Err(self.failed(found.from, "it sent a notice of another version".into())),
            }
        }
    }

    fn take_notice(&self, found: raw::Found) -> Result<Vec<u8>, String> {
        let mut notice = vec![0; found.num_bytes.min(MAX_NOTICE_BYTES + 1)];
        let _lock = self.world.lock();
        // SAFETY: the vector stays here until the request is complete.
        let mut request = unsafe { self.notices.receive(&raw mut *notice, found.from) }?;
        // It has been announced, and is small.
        while !request.is_complete()? {
            hint::spin_loop();
        }
        Ok(notice)
    }

    fn failed(&self, rank: usize, reason: String) -> TransportError {
        TransportError::Failed { rank, reason }
    }

    fn ends(&self) -> MutexGuard<'_, Vec<End>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets time pass, the more the longer nothing has happened.
    fn idle(&self, idle_for: Duration) {
        match idle_for {
            short if short < self.spin => hint::spin_loop(),
            short if short < YIELD => thread::yield_now(),
            long if long < LIGHT => thread::sleep(NAP),
            _ => thread::sleep(LONG_NAP),
        }
    }
}

/// Buffers of callers that MPI may still read and write; it is never dropped with any left.
struct Flight<'t> {
    world: &'t MpiWorld,
    /// Each with the place of its message in the list.
    sends: Vec<(usize, Request)>,
    receives: Vec<(usize, Request)>,
}

impl Flight<'_> {
    /// Takes out the places of what is complete.
    fn land(&mut self) -> Result<(Vec<usize>, Vec<usize>), String> {
        let _lock = self.world.lock();
        let mut failure = None;
        let mut complete = |list: &mut Vec<(usize, Request)>| {
            let mut landed = Vec::new();
            list.retain_mut(|(place, request)| match request.is_complete() {
                Ok(false) => true,
                Ok(true) => {
                    landed.push(*place);
                    false
                }
                Err(reason) => {
                    failure.get_or_insert(reason);
                    true
                }
            });
            landed
        };
        let landed = (complete(&mut self.sends), complete(&mut self.receives));
        failure.map_or(Ok(landed), Err)
    }

    const fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty()
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let deadline = Instant::now() + CLOSING;
        while !self.is_empty() {
            let landed = self.land();
            if landed.is_err() || Instant::now() >= deadline {
                // Whoever owns the buffers will free them, and MPI would write to them still.
                let rank = self.world.rank();
                eprintln!(
                    "bonfire: rank {rank} ends: a collective failed while MPI was using its buffers, \
                     and MPI cannot be made to stop; the first cause is above or on another rank"
                );
                process::exit(1);
            }
            thread::sleep(NAP);
        }
    }
}

/// One call of [`exchange`](Transport::exchange).
struct Exchange<'e, 'o, 'i> {
    transport: &'e MpiTransport,
    ends: &'e mut [End],
    outgoing: &'e mut [Outgoing<'o>],
    incoming: &'e mut [Incoming<'i>],
    watch: &'e mut dyn Watch,
}

impl Exchange<'_, '_, '_> {
    fn run(&mut self, deadline: Instant) -> Result<(), TransportError> {
        let transport = self.transport;
        let mut flight = Flight { world: &transport.world, sends: Vec::new(), receives: Vec::new() };
        self.send_all(&mut flight)?;
        let (mut idle_since, mut last_tick) = (Instant::now(), Instant::now());
        loop {
            let has_begun = self.begin_receives(&mut flight)?;
            let (sent, received) = flight.land().map_err(|reason| transport.failed(transport.world.rank(), reason))?;
            let has_moved = has_begun || !sent.is_empty() || !received.is_empty();
            sent.into_iter().for_each(|place| self.outgoing[place].is_sent = true);
            for place in received {
                self.end_receive(place);
            }
            if self.incoming.iter().all(|room| room.is_received) && flight.sends.is_empty() {
                // A message that was here long ago may have a notice behind it that says that its sender has given up.
                return transport.take_notices(self.ends, self.watch);
            }
            let now = Instant::now();
            if has_moved {
                idle_since = now;
                continue;
            }
            transport.take_notices(self.ends, self.watch)?;
            self.check_ended()?;
            if now.duration_since(last_tick) >= TICK {
                last_tick = now;
                if self.watch.tick().is_break() {
                    return Err(TransportError::Stopped);
                }
            }
            if now >= deadline {
                return Err(TransportError::Late);
            }
            transport.idle(now.duration_since(idle_since));
        }
    }

    /// Starts to send everything: MPI keeps the order between two ranks.
    fn send_all(&mut self, flight: &mut Flight<'_>) -> Result<(), TransportError> {
        let transport = self.transport;
        for (place, message) in self.outgoing.iter_mut().enumerate() {
            let to = message.to;
            self.ends[to].num_sent += 1;
            message.num_sent = message.bytes.len();
            if message.bytes.len() <= COPIED_BYTES {
                let copy = message.bytes.to_vec();
                transport.send_copy(transport.messages, copy, to).map_err(|reason| transport.failed(to, reason))?;
                message.is_sent = true;
                continue;
            }
            let _lock = transport.world.lock();
            // SAFETY: the message is borrowed for longer than the flight lives, which outlives its requests.
            let request = unsafe { transport.messages.send(&raw const *message.bytes, to) };
            flight.sends.push((place, request.map_err(|reason| transport.failed(to, reason))?));
        }
        Ok(())
    }

    /// Starts to receive the next message of each rank, where one has been announced.
    fn begin_receives(&mut self, flight: &mut Flight<'_>) -> Result<bool, TransportError> {
        let transport = self.transport;
        let mut has_begun = false;
        // A rank whose next message has not come, or is coming.
        let mut is_waited_for = vec![false; self.ends.len()];
        for (place, room) in self.incoming.iter_mut().enumerate().filter(|(_, room)| !room.is_received) {
            let from = room.from;
            let is_coming = flight.receives.iter().any(|&(coming, _)| coming == place);
            if is_coming || is_waited_for[from] {
                continue;
            }
            let _lock = transport.world.lock();
            let found = transport.messages.probe(Some(from)).map_err(|reason| transport.failed(from, reason))?;
            let Some(found) = found else {
                is_waited_for[from] = true;
                continue;
            };
            let max = room.bytes.len();
            if found.num_bytes > max {
                return Err(TransportError::TooLong { rank: from, num_bytes: found.num_bytes as u64, max });
            }
            room.num_received = found.num_bytes;
            // SAFETY: the room is borrowed for longer than the flight lives, which outlives its requests, and until then
            // only looked at when it is complete.
            let request = unsafe { transport.messages.receive(&raw mut room.bytes[..found.num_bytes], from) };
            flight.receives.push((place, request.map_err(|reason| transport.failed(from, reason))?));
            self.ends[from].num_received += 1;
            has_begun = true;
        }
        Ok(has_begun)
    }

    fn end_receive(&mut self, place: usize) {
        let room = &mut self.incoming[place];
        room.is_received = true;
        self.watch.arrived(room.from, &room.bytes[..room.num_received]);
    }

    /// Finds a rank that is needed and has ended; all that it sent has been received.
    fn check_ended(&self) -> Result<(), TransportError> {
        let has_ended = |room: &&Incoming<'_>| {
            let End { num_received, closed_after, .. } = self.ends[room.from];
            closed_after.is_some_and(|count| num_received >= count)
        };
        let missing = self.incoming.iter().filter(|room| !room.is_received && room.num_received == 0);
        missing
            .filter(has_ended)
            .map(|room| room.from)
            .next()
            .map_or(Ok(()), |rank| Err(TransportError::Ended { rank }))
    }
}

impl Transport for MpiTransport {
    fn rank(&self) -> usize {
        self.world.rank()
    }

    fn world_size(&self) -> usize {
        self.world.world_size()
    }

    fn exchange(
        &self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Instant,
        watch: &mut dyn Watch,
    ) -> Result<(), TransportError> {
        let mut ends = self.ends();
        Exchange { transport: self, ends: &mut ends, outgoing, incoming, watch }.run(deadline)
    }

    fn notify(&self, to: usize, notice: &[u8]) {
        self.post(to, NOTICE, notice);
    }

    fn reduces(&self, dtype: DType, op: ReduceOp) -> bool {
        self.native_sum && matches!(dtype, DType::F32 | DType::F64) && matches!(op, ReduceOp::Sum | ReduceOp::Mean)
    }

    fn all_reduce(
        &self,
        buffer: &mut BufferMut<'_>,
        op: ReduceOp,
        deadline: Instant,
        watch: &mut dyn Watch,
    ) -> Result<(), TransportError> {
        let dtype = buffer.dtype();
        buffer.as_bytes_mut().chunks_mut(SUM_BYTES).try_for_each(|piece| self.sum(piece, dtype, deadline, watch))?;
        if op == ReduceOp::Mean {
            reduce::divide(dtype, buffer.as_bytes_mut(), self.world_size());
        }
        Ok(())
    }
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        let ends = std::mem::take(&mut *self.ends());
        for to in self.others() {
            self.post(to, CLOSE, &ends[to].num_sent.to_le_bytes());
        }
        let mut copies = std::mem::take(&mut *self.copies.lock().unwrap_or_else(PoisonError::into_inner));
        let deadline = Instant::now() + CLOSING;
        while !copies.is_empty() && Instant::now() < deadline {
            {
                let _lock = self.world.lock();
                copies.retain_mut(|(request, _)| !request.is_complete().unwrap_or(false));
            }
            thread::sleep(NAP);
        }
        // MPI may still read what is left: nobody has taken it yet.
        std::mem::forget(copies);
    }
}
