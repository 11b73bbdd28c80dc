//! The side of rank 0: listens, lets ranks in, answers them.
//!
//! A thread listens, and each connection has a thread of its own. Whoever has not yet shown the token can hold a thread
//! and a few hundred bytes for [`HANDSHAKE`], and makes room for the next when [`MAX_STRANGERS`] are there. Behind it, a
//! connection may be silent for as long as it likes, but a frame that has begun must end within [`FRAME`].

use std::{
    collections::BTreeSet,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    MemoryStore, Store, StoreError,
    wire::{self, BadHello, Hello, Outcome, Reply, Request, Timed},
};
use crate::launch::Token;

/// How long a stranger has to say hello.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// How long a frame may take from its first byte to its last, and an answer until the other side takes it.
const FRAME: Duration = Duration::from_secs(10);
/// Connections that have not said hello yet; one more, and the oldest has to go.
const MAX_STRANGERS: usize = 128;
/// Connections of ranks: one each, and more where threads of a rank wait at the same time.
const MAX_MEMBERS_PER_RANK: usize = 4;
const MIN_MAX_MEMBERS: usize = 256;
/// How often the listener looks for new connections.
const POLL: Duration = Duration::from_millis(5);
/// How long answers that are on their way may still take when the store is closed.
const CLOSING: Duration = Duration::from_secs(1);
/// The frames lie on the heap.
const STACK_BYTES: usize = 256 * 1024;
/// How many ranks that never joined an answer names.
const MAX_ABSENT: usize = 1024;

/// The store while it is hosted; dropping it ends all its threads.
pub(super) struct Host {
    shared: Arc<Shared>,
    address: SocketAddr,
    listener: Option<JoinHandle<()>>,
}

struct Shared {
    memory: MemoryStore,
    token: Token,
    world_size: usize,
    joined: Mutex<BTreeSet<usize>>,
    num_members: Mutex<usize>,
    is_closing: AtomicBool,
}

/// A connection, as the listener knows it.
struct Connection {
    /// For waking its thread.
    stream: TcpStream,
    stage: Arc<AtomicU8>,
    thread: JoinHandle<()>,
}

/// The stages of a connection.
const STRANGER: u8 = 0;
const MEMBER: u8 = 1;
/// Had to make room.
const EVICTED: u8 = 2;

impl Host {
    /// Listens at `address` (a name or an IP address) and `port`, 0 for any free one.
    ///
    /// Only an address that says so itself confines it to the loopback device; a host name most often stands for several
    /// addresses, of which other nodes see another one than this node.
    pub(super) fn start(address: &str, port: u16, token: Token, world_size: usize) -> Result<Self, StoreError> {
        let shown = super::tcp::show(address, port);
        let listener = bind(address, port).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => StoreError::PortInUse { address: shown.clone() },
            _ => StoreError::Bind { address: shown.clone(), reason: error.to_string() },
        })?;
        let failed = |error: io::Error| StoreError::Bind { address: shown.clone(), reason: error.to_string() };
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared {
            memory: MemoryStore::new(),
            token,
            world_size,
            joined: Mutex::new(BTreeSet::from([0])),
            num_members: Mutex::new(0),
            is_closing: AtomicBool::new(false),
        });
        let listen = {
            let shared = shared.clone();
            move || shared.listen(&listener, address.port())
        };
        let thread = named(address.port()).spawn(listen).map_err(failed)?;
        tracing::debug!(%address, world_size, "hosts the store");
        Ok(Self { shared, address, listener: Some(thread) })
    }

    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }

    /// The values, without a way over the network.
    pub(super) fn memory(&self) -> &MemoryStore {
        &self.shared.memory
    }

    pub(super) fn absent(&self) -> Vec<usize> {
        self.shared.absent()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.shared.is_closing.store(true, Ordering::Release);
        self.shared.memory.close();
        if let Some(listener) = self.listener.take() {
            listener.thread().unpark();
            // It has no code that panics; if it did, there is nobody to tell.
            drop(listener.join());
        }
    }
}

/// Listens on the loopback device alone if the address says so itself, otherwise on all.
pub(crate) fn bind(address: &str, port: u16) -> io::Result<TcpListener> {
    let any_v4 = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    match address.parse::<IpAddr>() {
        Ok(ip) if ip.is_loopback() => TcpListener::bind((ip, port)),
        Ok(IpAddr::V4(_)) => TcpListener::bind((any_v4, port)),
        Err(_) if address.eq_ignore_ascii_case("localhost") => {
            let addresses: Vec<SocketAddr> = (address, port).to_socket_addrs()?.collect();
            TcpListener::bind(&*addresses)
        }
        Ok(IpAddr::V6(_)) | Err(_) => match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
            // A machine without IPv6.
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => TcpListener::bind((any_v4, port)),
            result => result,
        },
    }
}

/// Threads are named after the port: Linux shows up to 15 bytes of a name.
fn named(port: u16) -> thread::Builder {
    thread::Builder::new().name(format!("store-{port}")).stack_size(STACK_BYTES)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    fn max_members(&self) -> usize {
        self.world_size.saturating_mul(MAX_MEMBERS_PER_RANK).max(MIN_MAX_MEMBERS)
    }

    fn absent(&self) -> Vec<usize> {
        let joined = lock(&self.joined);
        (0..self.world_size).filter(|rank| !joined.contains(rank)).take(MAX_ABSENT).collect()
    }

    fn listen(self: &Arc<Self>, listener: &TcpListener, port: u16) {
        let mut connections: Vec<Connection> = Vec::new();
        while !self.is_closing() {
            match listener.accept() {
                Ok((stream, _)) => {
                    connections.retain(|connection| !connection.thread.is_finished());
                    if self.make_room(&connections) {
                        // A machine that has no thread or socket left refuses this one connection; whoever made it retries.
                        connections.extend(self.admit(stream, port).ok());
                    }
                }
                // Nothing to accept, or nothing to accept it with.
                Err(_) => {
                    connections.retain(|connection| !connection.thread.is_finished());
                    thread::park_timeout(POLL);
                }
            }
        }
        close_all(connections);
    }

    /// Whether one more connection may have a thread; if need be, the oldest stranger is sent away.
    fn make_room(&self, connections: &[Connection]) -> bool {
        let mut num_strangers = 0;
        let mut oldest = None;
        for connection in connections {
            if connection.stage.load(Ordering::Acquire) == STRANGER {
                num_strangers += 1;
                oldest = oldest.or(Some(connection));
            }
        }
        if let Some(oldest) = oldest.filter(|_| num_strangers >= MAX_STRANGERS) {
            let (from, to) = (STRANGER, EVICTED);
            if oldest.stage.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                drop(oldest.stream.shutdown(Shutdown::Both));
            }
        }
        // Those sent away still have their threads for a moment.
        connections.len() < self.max_members() + 2 * MAX_STRANGERS
    }

    fn admit(self: &Arc<Self>, stream: TcpStream, port: u16) -> io::Result<Connection> {
        // On some systems it inherits this from the listener.
        stream.set_nonblocking(false)?;
        let stage = Arc::new(AtomicU8::new(STRANGER));
        let serve = {
            let (shared, stage, stream) = (self.clone(), stage.clone(), stream.try_clone()?);
            move || {
                // What goes wrong with one connection ends this connection.
                let result = shared.serve(&stream, &stage);
                tracing::trace!(?result, "a connection of the store ended");
                // The listener keeps a second handle until it next looks.
                drop(stream.shutdown(Shutdown::Both));
            }
        };
        let thread = named(port).spawn(serve)?;
        Ok(Connection { stream, stage, thread })
    }

    fn serve(&self, stream: &TcpStream, stage: &AtomicU8) -> io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(FRAME))?;
        let mut timed = Timed { stream, deadline: Some(Instant::now() + HANDSHAKE) };
        let (outcome, hello) = match wire::read_hello(&mut timed) {
            Ok(hello) if !self.token.matches(&hello.token, hello.token_num_bytes) => (Outcome::WrongToken, None),
            Ok(hello) => match Membership::enter(self) {
                Some(membership) => (Outcome::Welcome, Some((hello, membership))),
                None => (Outcome::Crowded, None),
            },
            Err(BadHello::Version) => (Outcome::WrongVersion, None),
            // Whoever does not speak the protocol gets no answer.
            Err(BadHello::Garbage | BadHello::Io) => return Ok(()),
        };
        let Some((Hello { rank, .. }, _membership)) = hello else {
            (&mut &*stream).write_all(&wire::encode_outcome(outcome))?;
            return drain(stream, &mut timed);
        };
        if stage.compare_exchange(STRANGER, MEMBER, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Ok(());
        }
        let rank = rank as usize;
        if rank < self.world_size {
            lock(&self.joined).insert(rank);
        }
        (&mut &*stream).write_all(&wire::encode_outcome(outcome))?;
        while let Some(payload) = wire::read_frame(stream, None, FRAME)? {
            let request = Request::decode(&payload).ok_or(io::ErrorKind::InvalidData)?;
            // Nothing of a store that is closing is answered: that the connection ends says so.
            let Some(reply) = self.answer(request) else { return Ok(()) };
            wire::write_frame(&mut &*stream, &reply.encode())?;
        }
        Ok(())
    }

    fn answer(&self, request: Request) -> Option<Reply> {
        let memory = &self.memory;
        let (keys, result) = match request {
            Request::Set { key, value } => {
                let result = memory.set(&key, &value).map(|()| Reply::Done);
                (vec![key], result)
            }
            Request::Get { key, timeout } => {
                let result = memory.get(&key, timeout).map(Reply::Value);
                (vec![key], result)
            }
            Request::Add { key, amount } => {
                let result = memory.add(&key, amount).map(Reply::Sum);
                (vec![key], result)
            }
            Request::Wait { keys, timeout } => {
                let names: Vec<&str> = keys.iter().map(String::as_str).collect();
                let result = memory.wait(&names, timeout).map(|()| Reply::Done);
                (keys, result)
            }
        };
        match result {
            Ok(reply) => Some(reply),
            Err(StoreError::Timeout { keys: missing, .. }) => {
                let as_u32 = |number: usize| u32::try_from(number).ok();
                // The missing keys are some of those that were asked for, in their order.
                let mut missing = missing.iter().peekable();
                let indices = keys.iter().enumerate().filter(|(_, key)| missing.next_if_eq(key).is_some());
                let missing = indices.filter_map(|(index, _)| as_u32(index)).collect();
                Some(Reply::Timeout { missing, absent: self.absent().into_iter().filter_map(as_u32).collect() })
            }
            Err(StoreError::NotANumber { reason, .. }) => Some(Reply::NotANumber { reason }),
            Err(StoreError::Full { .. }) => Some(Reply::Full),
            // Closed; or over a bound that whoever speaks the protocol checks himself.
            Err(_) => None,
        }
    }
}

/// Counts a connection among those of ranks for as long as it lives.
struct Membership<'a>(&'a Shared);

impl<'a> Membership<'a> {
    fn enter(shared: &'a Shared) -> Option<Self> {
        let mut num_members = lock(&shared.num_members);
        (*num_members < shared.max_members()).then(|| {
            *num_members += 1;
            Self(shared)
        })
    }
}

impl Drop for Membership<'_> {
    fn drop(&mut self) {
        *lock(&self.0.num_members) -= 1;
    }
}

/// Takes what the other side still sends: closing with bytes unread would take back the answer.
fn drain(stream: &TcpStream, timed: &mut Timed<'_>) -> io::Result<()> {
    stream.shutdown(Shutdown::Write)?;
    io::copy(&mut timed.take(4096), &mut io::sink()).map(drop)
}

/// Ends all connections: at once those that wait for a request, in a moment those that answer one.
fn close_all(connections: Vec<Connection>) {
    for connection in &connections {
        // Fails where the other side has gone already.
        drop(connection.stream.shutdown(Shutdown::Read));
    }
    let deadline = Instant::now() + CLOSING;
    while Instant::now() < deadline && connections.iter().any(|connection| !connection.thread.is_finished()) {
        thread::sleep(Duration::from_millis(1));
    }
    for connection in connections {
        drop(connection.stream.shutdown(Shutdown::Both));
        drop(connection.thread.join());
    }
}
