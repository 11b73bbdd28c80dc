//! How ranks find each other and connect, each with each.
//!
//! Every rank listens and tells its address in the store; the higher rank of two connects. Connections and handshakes of
//! all ranks go on together, so their order does not matter:
//!
//! ```text
//! hello    (who connects)  magic 8, version 2, rank 4, world size 4, group 8, token length 2, token 256 with zeros behind it
//! welcome  (who listens)   magic 8, version 2, outcome 1
//! ```

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use crate::{
    Meeting, ProcessGroupError, Refusal, Store, StoreError, Token, cursor::Cursor, fingerprint::fingerprint, store,
};

const MAGIC: [u8; 8] = *b"bonfire-";
/// Changes with every change of what is sent.
const VERSION: u16 = 1;
const HELLO_BYTES: usize = MAGIC.len() + 2 + 4 + 4 + 8 + 2 + Token::MAX_BYTES;
const WELCOME_BYTES: usize = MAGIC.len() + 2 + 1;
/// How long a stranger has to say hello.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// Connections that have not said hello yet; if more are silent, the oldest have to go.
const MAX_STRANGERS: usize = 128;
/// The longest that one try to connect takes.
const ONE_TRY: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// What both sides of a handshake must know.
struct Group<'a> {
    meeting: &'a Meeting<'a>,
    token: &'a Token,
    deadline: Instant,
    started: Instant,
}

/// Who has connected but not yet said hello.
struct Stranger {
    stream: TcpStream,
    hello: Vec<u8>,
    deadline: Instant,
}

/// A rank that has been told hello.
struct Host {
    rank: usize,
    address: String,
    stream: TcpStream,
    welcome: Vec<u8>,
}

/// The connections of this rank, by rank, nonblocking.
pub(super) fn connect(
    store: &dyn Store,
    meeting: &Meeting<'_>,
    token: &Token,
    host: &str,
) -> Result<Vec<Option<TcpStream>>, ProcessGroupError> {
    let (rank, world_size) = (meeting.rank, meeting.world_size.get());
    let key = |what: &str, rank: usize| format!("mesh/{}/{what}/{rank}", meeting.name);
    if store.add(&key("count", rank), 1)? > 1 {
        return Err(ProcessGroupError::NameTaken { rank, name: meeting.name.to_owned() });
    }
    let mut streams: Vec<Option<TcpStream>> = (0..world_size).map(|_| None).collect();
    if world_size == 1 {
        return Ok(streams);
    }
    let started = Instant::now();
    let group = Group { meeting, token, started, deadline: started + meeting.timeout };
    let no_port =
        |error: io::Error| ProcessGroupError::Listen { rank, address: host.to_owned(), reason: error.to_string() };
    // Others would try until their time is up.
    (host, 0).to_socket_addrs().map_err(no_port)?;
    let listener = store::listen(host, 0).map_err(no_port)?;
    listener.set_nonblocking(true).map_err(no_port)?;
    let port = listener.local_addr().map_err(no_port)?.port();
    store.set(&key("address", rank), store::show(host, port).as_bytes())?;

    let mut hosts = Vec::new();
    for other in 0..rank {
        let address = match store.get(&key("address", other), group.remaining()) {
            Err(StoreError::Timeout { .. }) => return Err(group.missing((0..rank).filter(|&it| it >= other))),
            address => String::from_utf8_lossy(&address?).into_owned(),
        };
        hosts.push(group.call(other, address)?);
    }
    group.shake_hands(&listener, &mut hosts, &mut streams)?;
    tracing::debug!(rank, world_size, name = meeting.name, elapsed = ?started.elapsed(), "connected with all ranks");
    Ok(streams)
}

impl Group<'_> {
    fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn missing(&self, missing: impl Iterator<Item = usize>) -> ProcessGroupError {
        ProcessGroupError::Missing {
            rank: self.meeting.rank,
            world_size: self.meeting.world_size.get(),
            name: self.meeting.name.to_owned(),
            waited: self.started.elapsed(),
            missing: missing.collect(),
        }
    }

    /// Connects to a rank and says hello; tries again until it works or the time is over.
    fn call(&self, rank: usize, address: String) -> Result<Host, ProcessGroupError> {
        loop {
            let error = match self.try_call(&address) {
                Ok(stream) => return Ok(Host { rank, address, stream, welcome: Vec::new() }),
                Err(error) => error,
            };
            if self.remaining() <= PAUSE {
                return Err(self.unreachable(rank, address, &error));
            }
            thread::sleep(PAUSE);
        }
    }

    fn try_call(&self, address: &str) -> io::Result<TcpStream> {
        let mut result = Err(io::Error::new(io::ErrorKind::NotFound, "its name has no address"));
        for address in address.to_socket_addrs()? {
            result = self.try_address(&address);
            if result.is_ok() {
                break;
            }
        }
        result
    }

    fn try_address(&self, address: &SocketAddr) -> io::Result<TcpStream> {
        let timeout = self.remaining().clamp(Duration::from_millis(1), ONE_TRY);
        let stream = TcpStream::connect_timeout(address, timeout)?;
        stream.set_write_timeout(Some(timeout))?;
        (&mut &stream).write_all(&self.hello())?;
        prepare(&stream)?;
        Ok(stream)
    }

    /// Lets in the ranks above, and waits until the ranks below have let this one in.
    fn shake_hands(
        &self,
        listener: &TcpListener,
        hosts: &mut Vec<Host>,
        streams: &mut [Option<TcpStream>],
    ) -> Result<(), ProcessGroupError> {
        let rank = self.meeting.rank;
        let mut strangers: VecDeque<Stranger> = VecDeque::new();
        loop {
            let newcomers = std::iter::from_fn(|| listener.accept().ok()).take(MAX_STRANGERS);
            strangers.extend(newcomers.filter(|(stream, _)| prepare(stream).is_ok()).map(|(it, _)| Stranger::new(it)));
            for _ in 0..strangers.len() {
                let Some(stranger) = strangers.pop_front() else { break };
                self.meet(stranger, &mut strangers, streams);
            }
            // Only now, since among many at once most may be ranks.
            strangers.drain(..strangers.len().saturating_sub(MAX_STRANGERS));
            for mut host in std::mem::take(hosts) {
                match self.is_welcome(&mut host)? {
                    true => streams[host.rank] = Some(host.stream),
                    false => hosts.push(host),
                }
            }
            let missing = || (0..streams.len()).filter(|&other| other != rank && streams[other].is_none());
            if missing().next().is_none() {
                return Ok(());
            }
            let remaining = self.remaining();
            if remaining.is_zero() {
                return Err(self.missing(missing()));
            }
            let sockets = strangers.iter().map(|one| &one.stream).chain(hosts.iter().map(|one| &one.stream));
            let mut fds: Vec<_> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
            fds.push(PollFd::new(listener, PollFlags::IN));
            super::wait(&mut fds, remaining.min(PAUSE));
        }
    }

    /// Reads on what a stranger says; a rank takes its place, who has not said all yet stays a stranger, all others go.
    fn meet(&self, mut stranger: Stranger, strangers: &mut VecDeque<Stranger>, streams: &mut [Option<TcpStream>]) {
        let is_open = read_up_to(&stranger.stream, &mut stranger.hello, HELLO_BYTES);
        let is_garbage = !stranger.hello.starts_with(&MAGIC[..MAGIC.len().min(stranger.hello.len())]);
        if is_garbage || (stranger.hello.len() < HELLO_BYTES && (!is_open || Instant::now() >= stranger.deadline)) {
            tracing::debug!(rank = self.meeting.rank, "turned away a connection that is no rank");
            return;
        }
        if stranger.hello.len() < HELLO_BYTES {
            strangers.push_back(stranger);
            return;
        }
        let (outcome, rank) = match self.check(&stranger.hello) {
            Ok(rank) if streams[rank].is_some() => (Outcome::WrongGroup, None),
            Ok(rank) => (Outcome::Welcome, Some(rank)),
            Err(outcome) => (outcome, None),
        };
        let mut welcome = Vec::from(MAGIC);
        welcome.extend(VERSION.to_le_bytes());
        welcome.push(outcome as u8);
        // A socket that has sent nothing yet takes these few bytes.
        let is_told = (&mut &stranger.stream).write_all(&welcome).is_ok();
        if let Some(rank) = rank.filter(|_| is_told) {
            streams[rank] = Some(stranger.stream);
        }
    }

    /// The rank that a hello is of, or why it is not let in.
    fn check(&self, hello: &[u8]) -> Result<usize, Outcome> {
        let mut cursor = Cursor::new(&hello[MAGIC.len()..]);
        let version = cursor.array().map(u16::from_le_bytes);
        if version != Some(VERSION) {
            return Err(Outcome::WrongVersion);
        }
        let (rank, world_size, group) = (cursor.u32(), cursor.u32(), cursor.u64());
        let num_bytes = cursor.array().map_or(0, u16::from_le_bytes);
        let token = cursor.array().ok_or(Outcome::WrongToken)?;
        if !self.token.matches(&token, num_bytes.into()) {
            return Err(Outcome::WrongToken);
        }
        let own_size = self.meeting.world_size.get();
        let rank = rank.map(|rank| rank as usize).filter(|&rank| rank > self.meeting.rank && rank < own_size);
        match rank {
            Some(rank) if world_size.map(|size| size as usize) == Some(own_size) && group == Some(self.id()) => {
                Ok(rank)
            }
            _ => Err(Outcome::WrongGroup),
        }
    }

    /// Whether a rank has let this one in.
    fn is_welcome(&self, host: &mut Host) -> Result<bool, ProcessGroupError> {
        let is_open = read_up_to(&host.stream, &mut host.welcome, WELCOME_BYTES);
        if host.welcome.len() < WELCOME_BYTES {
            return match is_open {
                true => Ok(false),
                // Whoever is no rank says something else; a rank says nothing only if it ends first.
                false if host.welcome.is_empty() => Err(self.missing([host.rank].into_iter())),
                false => Err(self.refused(host, Refusal::NotAStore)),
            };
        }
        let (magic, rest) = host.welcome.split_at(MAGIC.len());
        let version = u16::from_le_bytes([rest[0], rest[1]]);
        match rest[2] {
            _ if *magic != MAGIC => Err(self.refused(host, Refusal::NotAStore)),
            _ if version != VERSION => Err(self.refused(host, Refusal::Version { host: version, own: VERSION })),
            outcome if outcome == Outcome::Welcome as u8 => Ok(true),
            outcome if outcome == Outcome::WrongToken as u8 => Err(self.refused(host, Refusal::Token)),
            _ => Err(self.refused(host, Refusal::Group)),
        }
    }

    fn refused(&self, host: &Host, refusal: Refusal) -> ProcessGroupError {
        ProcessGroupError::Refused { rank: self.meeting.rank, other: host.rank, address: host.address.clone(), refusal }
    }

    fn unreachable(&self, other: usize, address: String, error: &io::Error) -> ProcessGroupError {
        let (rank, waited, reason) = (self.meeting.rank, self.started.elapsed(), error.to_string());
        ProcessGroupError::Connect { rank, other, address, waited, reason }
    }

    fn hello(&self) -> Vec<u8> {
        let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
        let mut bytes = Vec::from(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(number(self.meeting.rank));
        bytes.extend(number(self.meeting.world_size.get()));
        bytes.extend(self.id().to_le_bytes());
        bytes.extend(u16::try_from(self.token.num_bytes()).expect("a token has at most 256 bytes").to_le_bytes());
        bytes.extend(self.token.padded());
        bytes
    }

    fn id(&self) -> u64 {
        fingerprint(self.meeting.name.as_bytes())
    }
}

/// How a rank answers a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Welcome = 0,
    WrongVersion = 1,
    WrongToken = 2,
    WrongGroup = 3,
}

impl Stranger {
    fn new(stream: TcpStream) -> Self {
        Self { stream, hello: Vec::new(), deadline: Instant::now() + HANDSHAKE }
    }
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

/// Reads what has come, until `bytes` has `num_bytes`; says whether more can come.
fn read_up_to(stream: &TcpStream, bytes: &mut Vec<u8>, num_bytes: usize) -> bool {
    let missing = num_bytes.saturating_sub(bytes.len());
    match (&mut &*stream).take(missing as u64).read_to_end(bytes) {
        // All of it, or the end of the stream.
        Ok(num_read) => num_read == missing,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    #[test]
    fn more_ranks_than_strangers_are_let_in_at_once() {
        let world_size = NonZeroUsize::new(2 * MAX_STRANGERS).unwrap();
        let token = Token::new("campfire").unwrap();
        let meeting = |rank| Meeting { name: "test", rank, world_size, timeout: TIMEOUT };
        let meetings: Vec<_> = (0..world_size.get()).map(meeting).collect();
        let started = Instant::now();
        let (meetings, token) = (&meetings, &token);
        let of = move |rank: usize| Group { meeting: &meetings[rank], token, started, deadline: started + TIMEOUT };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let call = move |rank| of(rank).try_address(&address).unwrap();
            let calling = scope.spawn(move || (1..world_size.get()).map(call).collect::<Vec<_>>());
            // As many as the system lets wait at the port.
            thread::sleep(Duration::from_millis(100));
            let mut streams: Vec<Option<TcpStream>> = (0..world_size.get()).map(|_| None).collect();
            of(0).shake_hands(&listener, &mut Vec::new(), &mut streams).unwrap();
            drop(calling.join().unwrap());
        });
    }
}
