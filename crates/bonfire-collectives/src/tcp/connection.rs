//! The frames that cross a connection.
//!
//! ```text
//! frame    kind 1, zeros 3, length 4, length of the message 8, then the bytes
//! kinds    data: a piece of a message; notice: whole
//! ```
//!
//! A message is cut into pieces so that a notice need not wait for its end. Numbers are little-endian.

/// The longest piece.
pub(super) const MAX_PIECE_BYTES: usize = 1 << 20;
pub(super) const HEADER_BYTES: usize = 16;

/// The start of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) num_bytes: usize,
    /// Of the message that this is a piece of.
    pub(super) message_num_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Data,
    Notice,
}

impl Frame {
    pub(super) fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = match self.kind {
            Kind::Data => 1,
            Kind::Notice => 2,
        };
        bytes[4..8].copy_from_slice(&u32::try_from(self.num_bytes).expect("pieces are short").to_le_bytes());
        bytes[8..].copy_from_slice(&self.message_num_bytes.to_le_bytes());
        bytes
    }

    /// Nothing if these bytes start no frame.
    pub(super) fn decode(bytes: [u8; HEADER_BYTES]) -> Option<Self> {
        let kind = match bytes[..4] {
            [1, 0, 0, 0] => Kind::Data,
            [2, 0, 0, 0] => Kind::Notice,
            _ => return None,
        };
        let (_, numbers) = bytes.split_first_chunk::<4>()?;
        let (num_bytes, message) = numbers.split_first_chunk::<4>()?;
        let num_bytes = u32::from_le_bytes(*num_bytes) as usize;
        let message_num_bytes = u64::from_le_bytes(message.try_into().ok()?);
        (num_bytes <= MAX_PIECE_BYTES).then_some(Self { kind, num_bytes, message_num_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_decoded_to_what_they_were() {
        for kind in [Kind::Data, Kind::Notice] {
            let frame = Frame { kind, num_bytes: 77, message_num_bytes: 1 << 40 };
            assert_eq!(Frame::decode(frame.encode()), Some(frame));
            assert_eq!(Frame::decode(Frame { num_bytes: MAX_PIECE_BYTES + 1, ..frame }.encode()), None);
        }
        assert_eq!(Frame::decode(*b"GET / HTTP/1.1\r\n"), None);
    }
}
