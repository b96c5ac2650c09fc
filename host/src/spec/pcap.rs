//! The options of a capture file.

use super::{Opened, Options};
use vnplug_path::source::SourceError;
use vnplug_path::source::pcap::{PcapConfig, PcapFile, Repeat, Speed};

/// Opens the file that the options name.
pub(super) fn open(options: &mut Options<'_>) -> Result<Opened, SourceError> {
    let Some(path) = options.take("path") else {
        return Err(SourceError::new(format!(
            "source {:?}: a pcap source needs a path, as in {0}=pcap:FILE",
            options.name
        )));
    };
    let pace = match options.take("pace").as_deref() {
        None | Some("recorded") => Speed::Recorded,
        Some("top") => Speed::Top,
        Some(text) => match text.trim_end_matches('x').parse() {
            Ok(times) => Speed::Times(times),
            Err(_) => return Err(options.bad("pace", text, "recorded, top or a factor as 2.5x")),
        },
    };
    let repeat = match options.take("repeat").as_deref() {
        None | Some("once") => Repeat::Once,
        Some("forever") => Repeat::Forever,
        Some(text) => match text.parse() {
            Ok(times) => Repeat::Times(times),
            Err(_) => return Err(options.bad("repeat", text, "once, forever or a number")),
        },
    };
    options.done()?;
    let description = format!("file {path}");
    let ends = !matches!(repeat, Repeat::Forever);
    let queues = PcapFile::open(&PcapConfig {
        path: path.into(),
        pace,
        repeat,
    })?;
    Ok(("pcap", description, queues, ends))
}
