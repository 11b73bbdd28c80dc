//! What goes over the wire, and nothing that reads or writes a socket without a deadline.
//!
//! ```text
//! hello   (who joins)  magic 8, version 2, rank 4, token length 2, token 256 with zeros behind it
//! welcome (host)       magic 8, version 2, outcome 1
//! frame   (both)       length 4, then as many bytes: a request or a reply, which starts with its kind
//! ```
//!
//! Numbers are little-endian. Whatever comes, a decoder gives a value or nothing; it never reserves more than came.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use super::{MAX_VALUE_BYTES, StoreError};
use crate::{
    cursor::{Cursor, put_bytes},
    launch::Token,
};

/// Changes with every change of what is sent.
pub(super) const VERSION: u16 = 1;
const MAGIC: [u8; 8] = *b"bonfire\n";
/// The largest frame: a value with its key, or a list of keys.
pub(super) const MAX_FRAME_BYTES: usize = MAX_VALUE_BYTES + 4096;

/// What a process says of itself when it joins.
pub(super) struct Hello {
    pub(super) rank: u32,
    pub(super) token: [u8; Token::MAX_BYTES],
    pub(super) token_num_bytes: usize,
}

/// How the host answers a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Welcome,
    WrongVersion,
    WrongToken,
    Crowded,
}

/// What a rank asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Set { key: String, value: Vec<u8> },
    Get { key: String, timeout: Duration },
    Add { key: String, amount: i64 },
    Wait { keys: Vec<String>, timeout: Duration },
}

/// What the host answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Done,
    Value(Vec<u8>),
    Sum(i64),
    /// The indices of the keys that are missing, and ranks that never joined.
    Timeout {
        missing: Vec<u32>,
        absent: Vec<u32>,
    },
    NotANumber {
        reason: String,
    },
    Full,
}

pub(super) fn encode_hello(rank: u32, token: &Token) -> Vec<u8> {
    let mut bytes = Vec::from(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(rank.to_le_bytes());
    bytes.extend(u16::try_from(token.num_bytes()).expect("a token has at most 256 bytes").to_le_bytes());
    bytes.extend(token.padded());
    bytes
}

/// What came instead of a hello.
pub(super) enum BadHello {
    /// The stream ended, or took too long.
    Io,
    /// It is no hello.
    Garbage,
    /// It is one of another version.
    Version,
}

pub(super) fn read_hello(stream: &mut impl Read) -> Result<Hello, BadHello> {
    match read_start(stream) {
        Ok(Some(VERSION)) => {}
        Ok(Some(_)) => return Err(BadHello::Version),
        Ok(None) => return Err(BadHello::Garbage),
        Err(_) => return Err(BadHello::Io),
    }
    let mut bytes = [0; 6 + Token::MAX_BYTES];
    stream.read_exact(&mut bytes).map_err(|_| BadHello::Io)?;
    let mut cursor = Cursor::new(&bytes);
    let (rank, num_bytes) = (cursor.u32(), cursor.array().map(u16::from_le_bytes));
    let token = cursor.array();
    match (rank, num_bytes, token) {
        (Some(rank), Some(num_bytes), Some(token)) => Ok(Hello { rank, token, token_num_bytes: num_bytes.into() }),
        _ => Err(BadHello::Garbage),
    }
}

/// The version behind the magic; nothing if it is no magic.
fn read_start(stream: &mut impl Read) -> io::Result<Option<u16>> {
    let mut magic = [0; MAGIC.len()];
    stream.read_exact(&mut magic)?;
    if magic != MAGIC {
        return Ok(None);
    }
    let mut version = [0; 2];
    stream.read_exact(&mut version)?;
    Ok(Some(u16::from_le_bytes(version)))
}

pub(super) fn encode_outcome(outcome: Outcome) -> Vec<u8> {
    let mut bytes = Vec::from(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.push(match outcome {
        Outcome::Welcome => 0,
        Outcome::WrongVersion => 1,
        Outcome::WrongToken => 2,
        Outcome::Crowded => 3,
    });
    bytes
}

/// The host's version and its answer; nothing if it speaks something else.
pub(super) fn read_outcome(stream: &mut impl Read) -> io::Result<Option<(u16, Outcome)>> {
    let Some(version) = read_start(stream)? else { return Ok(None) };
    let mut outcome = [0; 1];
    stream.read_exact(&mut outcome)?;
    Ok(match outcome[0] {
        // Of another version only this is certain.
        _ if version != VERSION => Some((version, Outcome::WrongVersion)),
        0 => Some((version, Outcome::Welcome)),
        1 => Some((version, Outcome::WrongVersion)),
        2 => Some((version, Outcome::WrongToken)),
        3 => Some((version, Outcome::Crowded)),
        _ => None,
    })
}

pub(super) fn write_frame(stream: &mut impl Write, payload: &[u8]) -> io::Result<()> {
    let num_bytes = u32::try_from(payload.len()).expect("what is encoded is bounded");
    let mut frame = Vec::with_capacity(4 + payload.len());
    frame.extend(num_bytes.to_le_bytes());
    frame.extend(payload);
    stream.write_all(&frame)
}

/// One frame, its first byte by `first`, the rest within `rest` of it; nothing where the stream ends between frames.
pub(super) fn read_frame(stream: &TcpStream, first: Option<Instant>, rest: Duration) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    let mut idle = Timed { stream, deadline: first };
    if idle.read(&mut length[..1])? == 0 {
        return Ok(None);
    }
    let mut stream = Timed { stream, deadline: Some(Instant::now() + rest) };
    stream.read_exact(&mut length[1..])?;
    let num_bytes = u32::from_le_bytes(length) as usize;
    if num_bytes > MAX_FRAME_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {num_bytes} bytes")));
    }
    // Grows with what comes, not with what was announced.
    let mut payload = Vec::new();
    stream.take(num_bytes as u64).read_to_end(&mut payload)?;
    if payload.len() < num_bytes { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(Some(payload)) }
}

/// Reads from a socket until a moment, however slowly bytes come.
pub(super) struct Timed<'a> {
    pub(super) stream: &'a TcpStream,
    /// None: waits for ever.
    pub(super) deadline: Option<Instant>,
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let timeout = match self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return Err(io::ErrorKind::TimedOut.into()),
                timeout => timeout,
            };
            self.stream.set_read_timeout(timeout)?;
            match (&mut &*self.stream).read(buffer) {
                // Systems differ in which of the two a timeout is; whether it was one, the clock says.
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }
}

impl Request {
    /// # Errors
    ///
    /// [`StoreError::TooLong`] if it does not fit into a frame.
    pub(super) fn encode(&self) -> Result<Vec<u8>, StoreError> {
        let mut bytes = Vec::new();
        match self {
            Self::Set { key, value } => {
                bytes.push(0);
                put_bytes(&mut bytes, key.as_bytes());
                put_bytes(&mut bytes, value);
            }
            Self::Get { key, timeout } => {
                bytes.push(1);
                put_timeout(&mut bytes, *timeout);
                put_bytes(&mut bytes, key.as_bytes());
            }
            Self::Add { key, amount } => {
                bytes.push(2);
                bytes.extend(amount.to_le_bytes());
                put_bytes(&mut bytes, key.as_bytes());
            }
            Self::Wait { keys, timeout } => {
                bytes.push(3);
                put_timeout(&mut bytes, *timeout);
                for key in keys {
                    put_bytes(&mut bytes, key.as_bytes());
                }
            }
        }
        super::within("the request with all its keys", bytes.len(), MAX_FRAME_BYTES)?;
        Ok(bytes)
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        let mut cursor = Cursor::new(rest);
        let request = match kind {
            0 => Self::Set { key: cursor.text()?, value: cursor.bytes()?.to_vec() },
            1 => Self::Get { timeout: timeout(&mut cursor)?, key: cursor.text()? },
            2 => Self::Add { amount: cursor.array().map(i64::from_le_bytes)?, key: cursor.text()? },
            3 => {
                let timeout = timeout(&mut cursor)?;
                let mut keys = Vec::new();
                while !cursor.is_empty() {
                    keys.push(cursor.text()?);
                }
                Self::Wait { keys, timeout }
            }
            _ => return None,
        };
        cursor.is_empty().then_some(request)
    }
}

impl Reply {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Done => bytes.push(0),
            Self::Value(value) => {
                bytes.push(1);
                put_bytes(&mut bytes, value);
            }
            Self::Sum(sum) => {
                bytes.push(2);
                bytes.extend(sum.to_le_bytes());
            }
            Self::Timeout { missing, absent } => {
                bytes.push(3);
                for list in [missing, absent] {
                    let list: Vec<u8> = list.iter().flat_map(|number| number.to_le_bytes()).collect();
                    put_bytes(&mut bytes, &list);
                }
            }
            Self::NotANumber { reason } => {
                bytes.push(4);
                put_bytes(&mut bytes, reason.as_bytes());
            }
            Self::Full => bytes.push(5),
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        let mut cursor = Cursor::new(rest);
        let reply = match kind {
            0 => Self::Done,
            1 => Self::Value(cursor.bytes()?.to_vec()),
            2 => Self::Sum(cursor.array().map(i64::from_le_bytes)?),
            3 => Self::Timeout { missing: numbers(&mut cursor)?, absent: numbers(&mut cursor)? },
            4 => Self::NotANumber { reason: cursor.text()? },
            5 => Self::Full,
            _ => return None,
        };
        cursor.is_empty().then_some(reply)
    }
}

fn put_timeout(to: &mut Vec<u8>, timeout: Duration) {
    to.extend(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).to_le_bytes());
}

fn timeout(cursor: &mut Cursor<'_>) -> Option<Duration> {
    cursor.array().map(|bytes| Duration::from_millis(u64::from_le_bytes(bytes)))
}

fn numbers(cursor: &mut Cursor<'_>) -> Option<Vec<u32>> {
    let (chunks, rest) = cursor.bytes()?.as_chunks();
    rest.is_empty().then(|| chunks.iter().map(|chunk| u32::from_le_bytes(*chunk)).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key() -> impl Strategy<Value = String> {
        "[a-z/é]{0,20}"
    }

    fn timeout() -> impl Strategy<Value = Duration> {
        any::<u64>().prop_map(Duration::from_millis)
    }

    fn request() -> impl Strategy<Value = Request> {
        prop_oneof![
            (key(), any::<Vec<u8>>()).prop_map(|(key, value)| Request::Set { key, value }),
            (key(), timeout()).prop_map(|(key, timeout)| Request::Get { key, timeout }),
            (key(), any::<i64>()).prop_map(|(key, amount)| Request::Add { key, amount }),
            (prop::collection::vec(key(), 0..9), timeout()).prop_map(|(keys, timeout)| Request::Wait { keys, timeout }),
        ]
    }

    fn reply() -> impl Strategy<Value = Reply> {
        prop_oneof![
            Just(Reply::Done),
            Just(Reply::Full),
            any::<Vec<u8>>().prop_map(Reply::Value),
            any::<i64>().prop_map(Reply::Sum),
            key().prop_map(|reason| Reply::NotANumber { reason }),
            any::<(Vec<u32>, Vec<u32>)>().prop_map(|(missing, absent)| Reply::Timeout { missing, absent }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(request in request(), reply in reply()) {
            prop_assert_eq!(Request::decode(&request.encode().unwrap()), Some(request));
            prop_assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        }

        #[test]
        fn what_is_cut_or_changed_is_decoded_to_something_or_nothing(
            request in request(), reply in reply(), at: prop::sample::Index, byte: u8,
        ) {
            for bytes in [request.encode().unwrap(), reply.encode()] {
                let at = at.index(bytes.len());
                let cut = &bytes[..at];
                let mut changed = bytes.clone();
                changed[at] = byte;
                for bytes in [cut, &changed] {
                    // Whatever is understood is what these bytes say, and all of them.
                    if let Some(request) = Request::decode(bytes) {
                        prop_assert_eq!(request.encode().unwrap(), bytes);
                    }
                    if let Some(reply) = Reply::decode(bytes) {
                        prop_assert_eq!(reply.encode(), bytes);
                    }
                }
            }
        }

        #[test]
        fn any_bytes_are_a_hello_or_none(bytes: Vec<u8>) {
            prop_assert!(read_hello(&mut &*bytes).is_err());
        }
    }

    #[test]
    fn a_hello_says_who_joins() {
        let token = Token::new("campfire").unwrap();
        let bytes = encode_hello(7, &token);
        let Ok(hello) = read_hello(&mut &*bytes) else { panic!("it is one") };
        assert_eq!(hello.rank, 7);
        assert!(token.matches(&hello.token, hello.token_num_bytes));
        let outcome = encode_outcome(Outcome::WrongToken);
        assert_eq!(read_outcome(&mut &*outcome).unwrap(), Some((VERSION, Outcome::WrongToken)));
    }

    #[test]
    fn a_hello_of_another_version_is_told_apart_from_garbage() {
        let mut bytes = encode_hello(0, &Token::default());
        bytes[8] = 9;
        assert!(matches!(read_hello(&mut &*bytes), Err(BadHello::Version)));
        bytes[0] = b'B';
        assert!(matches!(read_hello(&mut &*bytes), Err(BadHello::Garbage)));
    }
}
