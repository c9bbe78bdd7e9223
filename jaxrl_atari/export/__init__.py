"""Exporting policies as programs that play without this package."""
