//! Puts the figures of a run into a document: goals, then a table below each plot.
//!
//! ```text
//! vnplug-bench publish target/bench/results.json docs/results.md "2026-11-21, five rounds"
//! vnplug-bench publish target/bench/results.json docs/results.md "2026-11-29, five rounds" \
//!     "back-ends, contexts and twin programs"
//! ```
//!
//! What stands in the document between the two marks is replaced; plots lie in a folder `plots`
//! beside it. Everything else of the document is left alone. Rows that are measured on another day than the
//! rest are a part of the document, which has marks of its own with the part's name ([`PARTS`]).

use std::fs;
use std::path::Path;

use crate::goal::Goal;
use crate::plot;
use crate::report;
use crate::row::{Figure, Result};

/// `FILE DOCUMENT WHEN [PART]`.
pub(crate) fn publish(words: &[String]) -> Result<()> {
    let (file, document, when, part) = match words {
        [file, document, when] => (file, document, when, None),
        [file, document, when, part] => (file, document, when, Some(Part::named(part)?)),
        _ => return Err("publish RESULTS.json DOCUMENT.md WHEN [PART]".into()),
    };
    let figures = of(part, report::load(Path::new(file))?);
    if figures.is_empty() {
        return Err(format!("{file} has no figure of this part of the document").into());
    }
    let document = Path::new(document);
    let folder = document.parent().unwrap_or(Path::new(".")).join("plots");
    fs::create_dir_all(&folder)?;
    let head = format!("{}. {when}.", report::machine());
    let sections = sections(&figures, &folder, level(part))?;
    let text = between(
        &fs::read_to_string(document)?,
        part,
        &format!("{head}\n{sections}"),
    )?;
    Ok(fs::write(document, text)?)
}

/// Rows that have a place of their own in a document.
#[derive(Debug)]
struct Part {
    name: &'static str,
    /// How the names of its figures begin.
    rows: &'static [&'static str],
}

/// A figure belongs to the first that has it.
const PARTS: &[Part] = &[
    Part {
        name: "many guests, engines of uplinks, and system calls of QEMU",
        rows: &["context-guests", "uplink-engines", "switch-calls"],
    },
    Part {
        name: "back-ends, contexts and twin programs",
        rows: &["backend-", "context-", "twin-"],
    },
    Part {
        name: "cards that do a guest's work, requests, and paths that lose",
        rows: &["hlvi", "tcp-rr", "aggregate-loss-"],
    },
    Part {
        name: "stages",
        rows: &["tcp-stage-", "stage-switch-"],
    },
    Part {
        name: "floods, ACKs alone, and senders",
        rows: &[
            "aggregate-flood-",
            "acks-only-",
            "aggregate-cubic-",
            "aggregate-reno-",
            "aggregate-bbr-",
            "acks-senders-",
        ],
    },
    Part {
        name: "sockets of VDE, and guests without offloads",
        rows: &["switch-vde-", "switch-mixed-"],
    },
];

impl Part {
    fn named(name: &str) -> Result<&'static Self> {
        PARTS.iter().find(|part| part.name == name).ok_or_else(|| {
            let all: Vec<&str> = PARTS.iter().map(|part| part.name).collect();
            format!("no part {name:?}; there are: {}", all.join("; ")).into()
        })
    }

    /// The one that a figure belongs to.
    fn of(figure: &Figure) -> Option<&'static Self> {
        let has = |part: &&Self| part.rows.iter().any(|row| figure.name.starts_with(row));
        PARTS.iter().find(has)
    }
}

/// The figures of a part; without one, those that are in no part.
fn of(part: Option<&Part>, mut figures: Vec<Figure>) -> Vec<Figure> {
    figures.retain(|figure| Part::of(figure).map(|it| it.name) == part.map(|it| it.name));
    figures
}

/// The text with what is between the marks replaced.
fn between(text: &str, part: Option<&Part>, new: &str) -> Result<String> {
    let (begin, end) = marks(part);
    let missing = || format!("the document has no {begin} and {end}");
    let (before, rest) = text.split_once(&begin).ok_or_else(missing)?;
    let (_, after) = rest.split_once(&end).ok_or_else(missing)?;
    Ok(format!("{before}{begin}\n\n{new}\n{end}{after}"))
}

/// The lines before and behind the figures.
fn marks(part: Option<&Part>) -> (String, String) {
    let of = part.map_or(String::new(), |part| format!(" of {}", part.name));
    (
        format!("<!-- figures{of}: written by vnplug-bench publish -->"),
        format!("<!-- end of figures{of} -->"),
    )
}

/// How a heading begins: a part has one in the document, and its sections lie below that.
fn level(part: Option<&Part>) -> &'static str {
    match part {
        Some(_) => "###",
        None => "##",
    }
}

/// The goals' table, if any has one, then each plot with the table of its figures, each figure once.
fn sections(figures: &[Figure], folder: &Path, level: &str) -> Result<String> {
    let mut text = String::new();
    if figures.iter().any(|figure| Goal::of(figure).is_some()) {
        let goals = report::goals_table(figures);
        text += &format!("\n{level} Goals\n\n{goals}");
    }
    let mut shown = vec![false; figures.len()];
    for drawing in plot::drawings(figures) {
        let name = format!("{}.svg", drawing.name);
        fs::write(folder.join(&name), drawing.file)?;
        let title = drawing.title;
        text += &format!("\n{level} {title}\n\n![{title}](plots/{name})\n");
        let new: Vec<usize> = drawing.shows.into_iter().filter(|&at| !shown[at]).collect();
        if !new.is_empty() {
            let table = report::markdown(new.iter().map(|&at| &figures[at]));
            text += &format!("\n{table}");
        }
        new.into_iter().for_each(|at| shown[at] = true);
    }
    let rest = || figures.iter().zip(&shown).filter(|(_, shown)| !**shown);
    if rest().next().is_some() {
        let table = report::markdown(rest().map(|(figure, _)| figure));
        text += &format!("\n{level} Others\n\n{table}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Option<&'static Part>> {
        std::iter::once(None).chain(PARTS.iter().map(Some))
    }

    #[test]
    fn only_what_is_between_the_marks_is_replaced() {
        let places: Vec<String> = all()
            .map(|part| {
                let (begin, end) = marks(part);
                format!("a\n{begin}\nold\n{end}\nb\n")
            })
            .collect();
        for (at, part) in all().enumerate() {
            let (begin, end) = marks(part);
            let new = between(&places.concat(), part, "new").unwrap();
            let mut wanted = places.clone();
            wanted[at] = format!("a\n{begin}\n\nnew\n{end}\nb\n");
            assert_eq!(new, wanted.concat(), "{part:?}");
            assert!(between("a", part, "new").is_err());
        }
    }

    #[test]
    fn the_documentation_has_the_marks() {
        let texts = [
            include_str!("../../docs/results.md"),
            include_str!("../../docs/offloads.md"),
            include_str!("../../docs/switch-speed.md"),
        ];
        for part in all() {
            let has = texts.map(|text| between(text, part, "").is_ok());
            // What is in no part is in all.
            assert_eq!(has.contains(&false), part.is_some(), "{part:?}");
            assert!(has.contains(&true), "{part:?}");
        }
    }

    #[test]
    fn a_figure_is_in_one_place_of_the_document() {
        let figure = |name: &str| Figure {
            name: name.into(),
            unit: "us",
            ours: Default::default(),
            peer: None,
            limit: None,
            note: String::new(),
        };
        let names = [
            "acks-guest",
            "acks-senders-10240",
            "backend-event",
            "context-guests-8",
            "context-tx-1",
            "handoff-60",
            "stage-60-copy",
            "stage-switch-60",
            "twin-count-60",
        ];
        let figures: Vec<Figure> = names.into_iter().map(figure).collect();
        let names = |part| -> Vec<String> {
            let of = of(part, figures.clone());
            of.into_iter().map(|figure| figure.name).collect()
        };
        assert_eq!(names(None), ["acks-guest", "handoff-60", "stage-60-copy"]);
        let guests =
            Part::named("many guests, engines of uplinks, and system calls of QEMU").unwrap();
        assert_eq!(names(Some(guests)), ["context-guests-8"]);
        let part = Part::named("back-ends, contexts and twin programs").unwrap();
        assert_eq!(
            names(Some(part)),
            ["backend-event", "context-tx-1", "twin-count-60"]
        );
        let error = Part::named("nosuch").unwrap_err().to_string();
        assert!(error.contains(part.name), "{error}");
    }
}
