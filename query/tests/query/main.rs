//! vnplug-query as it is run: on capture files that the store's writer makes, beside capinfos and tshark.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod answers;
mod files;
mod lab;
mod recorder;
mod refusals;
mod speed;
