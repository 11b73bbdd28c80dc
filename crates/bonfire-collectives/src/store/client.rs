//! The side of every other rank.

use std::{
    io::{self, Write},
    net::{TcpStream, ToSocketAddrs},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{
    MAX_STORE_BYTES, Refusal, StoreError,
    wire::{self, Outcome, Reply, Request, Timed},
};
use crate::launch::Token;

/// How much longer than the host may wait the answer may take.
const GRACE: Duration = Duration::from_secs(5);
/// The longest that one try to connect takes, so that a later one can find a host that has started meanwhile.
const ONE_TRY: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(500);

pub(super) struct Client {
    address: String,
    port: u16,
    token: Token,
    rank: u32,
    /// For what the host answers at once.
    timeout: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Connections that nobody uses: one for each call that is under way at the same time.
    idle: Vec<TcpStream>,
    /// Why the host is gone.
    lost: Option<String>,
}

/// Why a try to connect failed.
enum Failed {
    /// In a way that time can mend.
    ForNow(String),
    ForGood(Refusal),
}

impl Client {
    pub(super) fn connect(
        address: &str,
        port: u16,
        token: Token,
        rank: u32,
        timeout: Duration,
    ) -> Result<Self, StoreError> {
        let state = Mutex::default();
        let client = Self { address: address.into(), port, token, rank, timeout, state };
        let stream = client.open(timeout)?;
        client.lock().idle.push(stream);
        Ok(client)
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Asks the host, which itself waits for at most `timeout`.
    pub(super) fn call(&self, request: &Request, timeout: Duration) -> Result<Reply, StoreError> {
        let payload = request.encode()?;
        let idle = {
            let mut state = self.lock();
            if let Some(reason) = &state.lost {
                return Err(self.gone(reason));
            }
            state.idle.pop()
        };
        let stream = match idle {
            Some(stream) => stream,
            None => self.open(self.timeout).map_err(|error| match error {
                // It was there before.
                StoreError::Connect { reason, .. } => self.lose(reason),
                other => other,
            })?,
        };
        match exchange(&stream, &payload, timeout) {
            Ok(reply) => {
                self.lock().idle.push(stream);
                Ok(reply)
            }
            Err(error) => Err(self.lose(reason(&error))),
        }
    }

    /// The error that the host's answer stands for, if it is one.
    pub(super) fn check(&self, reply: Reply, keys: &[&str], waited: Duration) -> Result<Reply, StoreError> {
        match reply {
            Reply::Timeout { missing, absent } => {
                let keys = missing.into_iter().filter_map(|index| keys.get(index as usize));
                let keys = keys.map(|key| (*key).to_owned()).collect();
                let absent = absent.into_iter().map(|rank| rank as usize).collect();
                Err(StoreError::Timeout { keys, waited, absent })
            }
            Reply::NotANumber { reason } => {
                Err(StoreError::NotANumber { key: keys.first().copied().unwrap_or_default().into(), reason })
            }
            Reply::Full => Err(StoreError::Full { max_bytes: MAX_STORE_BYTES }),
            Reply::Done | Reply::Value(_) | Reply::Sum(_) => Ok(reply),
        }
    }

    /// The host answered something else than was asked.
    pub(super) fn confused(&self) -> StoreError {
        self.lose("it sent an answer that does not fit the question".into())
    }

    fn lose(&self, reason: String) -> StoreError {
        let mut state = self.lock();
        state.idle.clear();
        let reason = state.lost.get_or_insert(reason);
        self.gone(reason)
    }

    fn gone(&self, reason: &str) -> StoreError {
        StoreError::HostGone { rank: self.rank as usize, address: self.shown(), reason: reason.to_owned() }
    }

    fn shown(&self) -> String {
        super::tcp::show(&self.address, self.port)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects and says hello, again and again until it works or `timeout` is over.
    fn open(&self, timeout: Duration) -> Result<TcpStream, StoreError> {
        let start = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let remaining = timeout.saturating_sub(start.elapsed());
            let reason = match self.try_open(remaining.clamp(Duration::from_millis(1), ONE_TRY)) {
                Ok(stream) => return Ok(stream),
                Err(Failed::ForNow(reason)) => reason,
                Err(Failed::ForGood(refusal)) => {
                    return Err(StoreError::Refused { rank: self.rank as usize, address: self.shown(), refusal });
                }
            };
            let waited = start.elapsed();
            if waited + pause >= timeout {
                return Err(StoreError::Connect { rank: self.rank as usize, address: self.shown(), waited, reason });
            }
            thread::sleep(pause);
            pause = (2 * pause).min(MAX_PAUSE);
        }
    }

    fn try_open(&self, timeout: Duration) -> Result<TcpStream, Failed> {
        let for_now = |error: io::Error| Failed::ForNow(reason(&error));
        let deadline = Instant::now() + timeout;
        let addresses = (&*self.address, self.port).to_socket_addrs().map_err(for_now)?;
        let mut connected = Err(Failed::ForNow("its name has no address".into()));
        for address in addresses {
            let remaining = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            connected = TcpStream::connect_timeout(&address, remaining).map_err(for_now);
            if connected.is_ok() {
                break;
            }
        }
        let stream = connected?;
        // A port that nobody listens at can, on one machine, be picked as the outgoing one, and TCP then meets itself.
        if stream.local_addr().ok() == stream.peer_addr().ok() {
            return Err(Failed::ForNow("nobody listens there".into()));
        }
        stream.set_nodelay(true).map_err(for_now)?;
        stream.set_write_timeout(Some(timeout)).map_err(for_now)?;
        (&mut &stream).write_all(&wire::encode_hello(self.rank, &self.token)).map_err(for_now)?;
        let answer = wire::read_outcome(&mut Timed { stream: &stream, deadline: Some(deadline) }).map_err(for_now)?;
        match answer {
            Some((_, Outcome::Welcome)) => Ok(stream),
            Some((host, Outcome::WrongVersion)) => Err(Failed::ForGood(Refusal::Version { host, own: wire::VERSION })),
            Some((_, Outcome::WrongToken)) => Err(Failed::ForGood(Refusal::Token)),
            Some((_, Outcome::Crowded)) => Err(Failed::ForGood(Refusal::Crowded)),
            None => Err(Failed::ForGood(Refusal::NotAStore)),
        }
    }
}

fn exchange(stream: &TcpStream, payload: &[u8], timeout: Duration) -> io::Result<Reply> {
    stream.set_write_timeout(Some(GRACE))?;
    wire::write_frame(&mut &*stream, payload)?;
    // A timeout too long to add up is none.
    let deadline = timeout.checked_add(GRACE).and_then(|timeout| Instant::now().checked_add(timeout));
    let payload = wire::read_frame(stream, deadline, GRACE)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    Reply::decode(&payload).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// What happened, for a message that already says to whom.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the connection was closed".into(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "no answer".into(),
        io::ErrorKind::InvalidData => "it sent what is no answer".into(),
        _ => error.to_string(),
    }
}
