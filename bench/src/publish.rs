//! Puts the figures of a run into a document: goals, then a table below each plot.
//!
//! ```text
//! vnplug-bench publish target/bench/results.json docs/results.md "2026-11-21, five rounds"
//! ```
//!
//! What stands in the document between the two marks is replaced; plots lie in a folder `plots`
//! beside it. Everything else of the document is left alone.

use std::fs;
use std::path::Path;

use crate::plot;
use crate::report;
use crate::row::{Figure, Result};

/// `FILE DOCUMENT WHEN`.
pub(crate) fn publish(words: &[String]) -> Result<()> {
    let [file, document, when] = words else {
        return Err("publish RESULTS.json DOCUMENT.md WHEN".into());
    };
    let figures = report::load(Path::new(file))?;
    let document = Path::new(document);
    let folder = document.parent().unwrap_or(Path::new(".")).join("plots");
    fs::create_dir_all(&folder)?;
    let head = format!("{}. {when}.", report::machine());
    let sections = sections(&figures, &folder)?;
    let text = between(
        &fs::read_to_string(document)?,
        &format!("{head}\n{sections}"),
    )?;
    Ok(fs::write(document, text)?)
}

/// The text with what is between the marks replaced.
fn between(text: &str, new: &str) -> Result<String> {
    let missing = || format!("the document has no {BEGIN} and {END}");
    let (before, rest) = text.split_once(BEGIN).ok_or_else(missing)?;
    let (_, after) = rest.split_once(END).ok_or_else(missing)?;
    Ok(format!("{before}{BEGIN}\n\n{new}\n{END}{after}"))
}

/// The goals' table, then each plot with the table of its figures, each figure once.
fn sections(figures: &[Figure], folder: &Path) -> Result<String> {
    let mut text = format!("\n## Goals\n\n{}", report::goals_table(figures));
    let mut shown = vec![false; figures.len()];
    for drawing in plot::drawings(figures) {
        let name = format!("{}.svg", drawing.name);
        fs::write(folder.join(&name), drawing.file)?;
        let title = drawing.title;
        text += &format!("\n## {title}\n\n![{title}](plots/{name})\n");
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
        text += &format!("\n## Others\n\n{table}");
    }
    Ok(text)
}

const BEGIN: &str = "<!-- figures: written by vnplug-bench publish -->";
const END: &str = "<!-- end of figures -->";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_marks_is_replaced() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let new = between(&text, "new").unwrap();
        assert_eq!(new, format!("a\n{BEGIN}\n\nnew\n{END}\nb\n"));
        assert!(between("a", "new").is_err());
    }

    #[test]
    fn the_documentation_has_the_marks() {
        let text = include_str!("../../docs/results.md");
        assert!(between(text, "").is_ok());
    }
}
