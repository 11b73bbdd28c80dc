//! A transport between processes: one TCP connection between any two ranks.
//!
//! The calling thread reads and writes itself, without blocking, and sleeps in `poll` when nothing comes for a moment: no
//! other thread has to be woken for a message. The kernel's buffers go on meanwhile.

mod connection;
mod mesh;
mod reader;
mod writer;

use std::{
    hint,
    net::{Shutdown, TcpStream},
    num::NonZeroUsize,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use reader::{Progress, Reader};
use writer::Writer;

use crate::{
    ExchangeCommunicator, Incoming, Meeting, Outgoing, ProcessGroupError, Store, Token, Transport, TransportError,
    Watch,
};

/// One rank of a group whose ranks are connected by TCP.
pub type TcpCommunicator = ExchangeCommunicator<TcpTransport>;

/// How long a waiting rank keeps its core busy before it sleeps: longer than a small collective takes on one machine.
const SPIN: Duration = Duration::from_micros(50);
/// How often a rank that waits looks up.
const TICK: Duration = Duration::from_millis(5);
/// How long the last notices may take when the transport is dropped, over all ranks.
const CLOSING: Duration = Duration::from_secs(1);
/// How long what is queued may take when messages were cut: a rank that still reads makes room sooner.
const CUTTING: Duration = Duration::from_millis(250);

/// One rank's connections to all others.
///
/// What crosses them is not encrypted: a network that others listen on is no place for it. A process that ends in any way
/// closes its connections, which the others notice in their next or current call.
pub struct TcpTransport {
    rank: usize,
    /// By rank; none for the own one.
    connections: Vec<Option<Connection>>,
    /// What was read, for the thread that exchanges.
    readers: Mutex<Vec<Reader>>,
    /// Zero where ranks outnumber cores: a spinning rank would keep the one it waits for from running.
    spin: Duration,
}

struct Connection {
    stream: TcpStream,
    /// Also for threads that notify.
    writer: Mutex<Writer>,
}

impl TcpTransport {
    /// Connects this rank with all others, who find each other by `store`, under a name that no other group has.
    ///
    /// `host` is the name or IP address at which others reach this rank; a loopback address keeps it to this machine. Who
    /// connects must know the `token`; whoever does not is turned away and disturbs nobody.
    ///
    /// # Errors
    ///
    /// [`ProcessGroupError::NameTaken`] if the name was used before, [`ProcessGroupError::Listen`] if no port can be opened,
    /// [`ProcessGroupError::Missing`] if ranks do not come in time or end first, [`ProcessGroupError::Connect`] if one
    /// cannot be reached, [`ProcessGroupError::Refused`] if one does not let this rank in, and those of the store.
    pub fn connect(
        store: &dyn Store,
        meeting: &Meeting<'_>,
        token: &Token,
        host: &str,
    ) -> Result<Self, ProcessGroupError> {
        let streams = mesh::connect(store, meeting, token, host)?;
        let num_cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let connection = |stream| Connection { stream, writer: Mutex::new(Writer::default()) };
        Ok(Self {
            rank: meeting.rank,
            readers: Mutex::new(streams.iter().map(|_| Reader::default()).collect()),
            connections: streams.into_iter().map(|stream| stream.map(connection)).collect(),
            spin: if meeting.world_size.get() <= num_cores { SPIN } else { Duration::ZERO },
        })
    }

    fn others(&self) -> impl Iterator<Item = (usize, &Connection)> {
        self.connections.iter().enumerate().filter_map(|(rank, connection)| Some((rank, connection.as_ref()?)))
    }

    /// Fills up messages that were cut, and sends what is queued to those who take it within `time`.
    fn flush(&self, time: Duration) {
        let deadline = Instant::now() + time;
        loop {
            let mut fds = Vec::new();
            for (_, connection) in self.others() {
                let mut writer = connection.writer();
                writer.pad();
                writer.flush(&connection.stream);
                if writer.has_queue() && writer.is_open() {
                    fds.push(PollFd::new(&connection.stream, PollFlags::OUT));
                }
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if fds.is_empty() || remaining.is_zero() {
                return;
            }
            wait(&mut fds, remaining);
        }
    }
}

impl Connection {
    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One call of [`exchange`](Transport::exchange).
struct Exchange<'e, 'o, 'i> {
    transport: &'e TcpTransport,
    readers: &'e mut [Reader],
    outgoing: &'e mut [Outgoing<'o>],
    incoming: &'e mut [Incoming<'i>],
    watch: &'e mut dyn Watch,
}

impl Exchange<'_, '_, '_> {
    fn run(&mut self, deadline: Instant) -> Result<(), TransportError> {
        self.take_early()?;
        let transport = self.transport;
        let mut idle_since = None;
        let mut last_tick = Instant::now();
        // The first look is at everybody: notices of those that nothing is expected from count too.
        let mut looks_at_all = true;
        loop {
            let has_written = self.write();
            let has_read = self.read(looks_at_all)?;
            looks_at_all = false;
            if self.is_done() {
                return Ok(());
            }
            self.check_ended()?;
            if has_read || has_written {
                idle_since = None;
                continue;
            }
            let now = Instant::now();
            if now.duration_since(*idle_since.get_or_insert(now)) < transport.spin {
                hint::spin_loop();
                continue;
            }
            if now.duration_since(last_tick) >= TICK {
                last_tick = now;
                if self.watch.tick().is_break() {
                    return Err(TransportError::Stopped);
                }
            }
            if now >= deadline {
                return Err(TransportError::Late);
            }
            self.sleep(TICK.min(deadline.saturating_duration_since(now)));
            // Notices that found a socket full, to ranks that no message goes to.
            transport.others().for_each(|(_, connection)| connection.writer().flush(&connection.stream));
            looks_at_all = true;
        }
    }

    /// Gives out the messages that came before they were asked for.
    fn take_early(&mut self) -> Result<(), TransportError> {
        for room in self.incoming.iter_mut() {
            if self.readers[room.from].take_early(room)? {
                self.watch.arrived(room.from, &room.bytes[..room.num_received]);
            }
        }
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.incoming.iter().all(|room| room.is_received) && self.outgoing.iter().all(|message| message.is_sent)
    }

    /// Writes what the connections take; says whether they took anything.
    fn write(&mut self) -> bool {
        let mut has_written = false;
        // A rank whose connection is full, or has an earlier message that is not through.
        let mut is_full = vec![false; self.readers.len()];
        for message in self.outgoing.iter_mut().filter(|message| !message.is_sent) {
            if let Some(connection) = &self.transport.connections[message.to]
                && !is_full[message.to]
            {
                has_written |= connection.writer().send(&connection.stream, message);
                is_full[message.to] = !message.is_sent;
            }
        }
        has_written
    }

    /// Reads what has come from ranks that a message is expected from, or from all.
    fn read(&mut self, all: bool) -> Result<bool, TransportError> {
        let mut has_read = false;
        for (rank, connection) in self.transport.others() {
            let is_expected = self.incoming.iter().any(|room| room.from == rank && !room.is_received);
            if !all && !is_expected {
                continue;
            }
            match self.readers[rank].read(rank, &connection.stream, self.incoming, self.watch)? {
                Progress::None => {}
                Progress::Short | Progress::Full => has_read = true,
                Progress::Stop => return Err(TransportError::Stopped),
            }
        }
        Ok(has_read)
    }

    /// Finds a rank that is needed and has ended; all that it sent has been read.
    fn check_ended(&self) -> Result<(), TransportError> {
        let missing = self.incoming.iter().filter(|room| !room.is_received).map(|room| room.from);
        let unsent = self.outgoing.iter().filter(|message| !message.is_sent).map(|message| message.to);
        for rank in missing.chain(unsent) {
            self.readers[rank].check_open(rank)?;
        }
        Ok(())
    }

    /// Sleeps until something can be read, or written where something is to be written, or for `timeout`.
    fn sleep(&mut self, timeout: Duration) {
        let mut fds = Vec::with_capacity(self.readers.len());
        for (rank, connection) in self.transport.others() {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, self.readers[rank].can_read());
            let is_writing = self.outgoing.iter().any(|message| message.to == rank && !message.is_sent);
            events
                .set(PollFlags::OUT, connection.writer().is_open() && (is_writing || connection.writer().has_queue()));
            if !events.is_empty() {
                fds.push(PollFd::new(&connection.stream, events));
            }
        }
        wait(&mut fds, timeout);
    }
}

/// Waits for events; what goes wrong shows when the sockets are used.
fn wait(fds: &mut [PollFd<'_>], timeout: Duration) {
    let timeout = Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos() as _ };
    let _ = poll(fds, Some(&timeout));
}

impl Transport for TcpTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.connections.len()
    }

    fn exchange(
        &self,
        outgoing: &mut [Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Instant,
        watch: &mut dyn Watch,
    ) -> Result<(), TransportError> {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        let result = Exchange { transport: self, readers: &mut readers, outgoing, incoming, watch }.run(deadline);
        if result.is_err() {
            // Notices must still get through, behind a message that was cut.
            self.flush(CUTTING);
        }
        result
    }

    fn notify(&self, to: usize, notice: &[u8]) {
        if let Some(connection) = &self.connections[to] {
            connection.writer().notify(&connection.stream, notice);
        }
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.flush(CLOSING);
        for (rank, connection) in self.others() {
            // Closing a connection with unread bytes can lose what was sent last.
            let readers = self.readers.lock();
            readers.unwrap_or_else(PoisonError::into_inner)[rank].drain(&connection.stream);
            drop(connection.stream.shutdown(Shutdown::Write));
        }
    }
}
