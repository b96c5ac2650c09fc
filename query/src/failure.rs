//! How a query fails: one line on stderr.

use std::fmt::Display;

/// Why nothing, or not all, could be done; the text says what to do.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) String);

impl Failure {
    /// An error with a text of its own.
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// `what: why`.
    pub(crate) fn about(what: impl Display, why: impl Display) -> Self {
        Self(format!("{what}: {why}"))
    }

    /// The reader of our output is gone: end at once, as if done.
    pub(crate) fn quiet() -> Self {
        Self(String::new())
    }
}

/// The error and its sources.
impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            let more = error.to_string();
            // Some errors repeat what is below them.
            if !text.contains(&more) {
                text += &format!(": {more}");
            }
            source = error.source();
        }
        Self(text)
    }
}
