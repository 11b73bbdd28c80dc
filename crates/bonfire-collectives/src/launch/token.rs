//! What a process must know to join a run.

use std::{fmt, hint};

use super::LaunchError;

/// A shared text that keeps processes of other runs, and strangers, out of a store.
///
/// It crosses the network as it is: it guards against mistakes and stray connections, not against somebody who listens.
/// `Debug` does not show it.
#[derive(Clone, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String", into = "String"))]
pub struct Token(String);

impl Token {
    /// The longest token, in bytes.
    pub const MAX_BYTES: usize = 256;

    /// A token of any text, empty for none.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Value`] if it is longer than [`MAX_BYTES`](Self::MAX_BYTES).
    pub fn new(text: impl Into<String>) -> Result<Self, LaunchError> {
        let text = text.into();
        if text.len() > Self::MAX_BYTES {
            let value = format!("a text of {} bytes", text.len());
            return Err(LaunchError::Value { name: "token", value, expected: "a text of at most 256 bytes" });
        }
        Ok(Self(text))
    }

    /// Its bytes, filled up with zeros: one length for every token.
    pub(crate) fn padded(&self) -> [u8; Self::MAX_BYTES] {
        let mut bytes = [0; Self::MAX_BYTES];
        bytes[..self.0.len()].copy_from_slice(self.0.as_bytes());
        bytes
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.0.len()
    }

    /// Compares in a time that does not depend on where the two differ.
    pub(crate) fn matches(&self, padded: &[u8; Self::MAX_BYTES], num_bytes: usize) -> bool {
        let mut difference = self.0.len() ^ num_bytes;
        for (own, other) in self.padded().iter().zip(padded) {
            // Else the compiler may leave the loop as soon as it knows.
            difference |= usize::from(hint::black_box(own ^ other));
        }
        hint::black_box(difference) == 0
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        self.matches(&other.padded(), other.num_bytes())
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "Token(none)" } else { "Token(hidden)" })
    }
}

impl TryFrom<String> for Token {
    type Error = LaunchError;

    fn try_from(text: String) -> Result<Self, LaunchError> {
        Self::new(text)
    }
}

impl From<Token> for String {
    fn from(token: Token) -> Self {
        token.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_equal_only_if_every_byte_is() {
        let token = |text: &str| Token::new(text).expect("it is short");
        let texts = ["", "a", "b", "aa", "a\0", "\0", &"x".repeat(255), &"x".repeat(256)];
        for (i, one) in texts.iter().enumerate() {
            for (j, other) in texts.iter().enumerate() {
                assert_eq!(token(one) == token(other), i == j, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn a_token_is_bounded_and_not_shown() {
        let message = Token::new("x".repeat(257)).unwrap_err().to_string();
        assert!(message.contains("257 bytes") && message.contains("at most 256"), "{message}");
        assert_eq!(format!("{:?}", Token::new("secret").unwrap()), "Token(hidden)");
    }
}
